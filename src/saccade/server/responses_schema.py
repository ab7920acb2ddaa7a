"""OpenAI request bodies for responses: fields, limits, conversion to chat messages. Nothing is stored."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError

from saccade.errors import InvalidValue
from saccade.inputs.chat_template import Scalar
from saccade.lod.types import Detail
from saccade.sampling_params import LIMITS, SamplingParams
from saccade.server.conversation import effort_variables
from saccade.server.json_body import StrictModel, UnsupportedParameter, validation_error
from saccade.server.message_schema import MAX_MESSAGES, MAX_PARTS, check_part, tag_by
from saccade.server.openai_schema import MAX_INT, MAX_TEMPLATE_KWARGS, Effort, TemplateValue
from saccade.server.tool_schema import AtMostMaxTools, Choice, JsonObject, ToolName, ToolOptions

# Fields of OpenAI's API that need what this server does not have, and what to do instead.
REFUSED = {
    "previous_response_id": "nothing is stored here; send the earlier items as input",
    "conversation": "nothing is stored here; send the earlier items as input",
    "prompt": "there are no stored prompts here; send instructions and input",
    "background": "responses cannot run in the background; leave it out",
    "max_tool_calls": "this server runs no tools by itself; leave it out",
    "context_management": "input is never shortened; leave it out",
}
ItemId = Annotated[str, Field(max_length=256)]


class InputText(StrictModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=MAX_PARTS)
    logprobs: list[Any] | None = None


class InputImage(StrictModel):
    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    detail: Detail | None = None
    file_id: None = None


_TEXT_TYPES = ("input_text", "output_text", "text")
InputPart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[InputText, Tag("~output_text")]
    | Annotated[InputText, Tag("~text")]
    | Annotated[InputImage, Tag("~input_image")],
    tag_by("type"),
    check_part("in an item", *_TEXT_TYPES, "input_image"),
]


def _tag_by_shape(value: Any) -> str | None:
    return "~string" if isinstance(value, str) else "~parts" if isinstance(value, list) else None


_CONTENT = Discriminator(
    _tag_by_shape, custom_error_type="content", custom_error_message="should be a string or a list of parts"
)
ItemContent = Annotated[
    Annotated[str, Tag("~string")]
    | Annotated[list[InputPart], Tag("~parts"), Field(max_length=MAX_PARTS, fail_fast=True)],
    _CONTENT,
]


class InputItem(StrictModel):
    id: ItemId | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: str | None = Field(default=None, max_length=64)


class FunctionCallItem(InputItem):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    arguments: str


class FunctionOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: ItemContent


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: list[InputText] | None = Field(default=None, max_length=MAX_PARTS, fail_fast=True)
    content: list[InputText] | None = Field(default=None, max_length=MAX_PARTS, fail_fast=True)
    encrypted_content: str | None = None


def _default_type(value: Any) -> Any:
    """An item with a role is a message, named so or not."""
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return {**value, "type": "message"}
    return value


AnyItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[FunctionOutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    tag_by("type"),
    check_part("as input", "message", "function_call", "function_call_output", "reasoning"),
    BeforeValidator(_default_type),
]


class ResponseTool(StrictModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseToolName(StrictModel):
    type: Literal["function"]
    name: ToolName


class TextFormat(StrictModel):
    type: Literal["text"]


class TextOptions(StrictModel):
    format: TextFormat | None = None


class ReasoningOptions(StrictModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(StrictModel):
    """POST /v1/responses"""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        Annotated[str, Tag("~string"), Field(min_length=1)]
        | Annotated[
            list[AnyItem], Tag("~parts"), Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
        ],
        Discriminator(
            _tag_by_shape,
            custom_error_type="input",
            custom_error_message="should be a string or a list of items",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    temperature: float | None = Field(default=None, ge=0, le=LIMITS["temperature"][1])
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    tools: Annotated[list[ResponseTool] | None, AtMostMaxTools] = Field(default=None, fail_fast=True)
    tool_choice: (
        Annotated[
            Annotated[Choice, Tag("~string")] | Annotated[ResponseToolName, Tag("~named")],
            Discriminator(lambda value: "~string" if isinstance(value, str) else "~named"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = Field(
        default=None, max_length=MAX_TEMPLATE_KWARGS
    )
    store: bool | None = None  # false in effect
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(default=None, max_length=8)
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)

    @property
    def tool_options(self) -> ToolOptions:
        choice = self.tool_choice or "auto"
        return ToolOptions(
            tools=[_chat_tool(one) for one in self.tools or ()],
            choice=choice.name if isinstance(choice, ResponseToolName) else choice,
            named=isinstance(choice, ResponseToolName),
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def template_variables(self) -> dict[str, Scalar]:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return {**effort_variables(effort), **(self.chat_template_kwargs or {})}

    @property
    def has_media(self) -> bool:
        if isinstance(self.input, str):
            return False
        contents = [
            one.content if isinstance(one, MessageItem) else one.output
            for one in self.input
            if isinstance(one, MessageItem | FunctionOutputItem)
        ]
        return any(isinstance(part, InputImage) for parts in contents for part in parts)

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )

    def chat_messages(self) -> list[dict[str, Any]]:
        """The input as OpenAI's chat messages: an answer's items become one message of the assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            elif isinstance(item, FunctionOutputItem):
                content = _content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            else:
                _add_to_answer(messages, item)
        return messages


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _content(content: ItemContent) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            url = {"url": part.image_url, **({"detail": part.detail} if part.detail is not None else {})}
            parts.append({"type": "image_url", "image_url": url})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _add_to_answer(messages: list[dict[str, Any]], item: StrictModel) -> None:
    """Reasoning, text and calls of one answer belong to one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    if isinstance(item, MessageItem):
        texts = _content(item.content)
        if not isinstance(texts, str):
            texts = "".join(part.get("text", "") for part in texts)
        message["content"] += texts
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in (item.content or item.summary or ()))
        if text:
            message["reasoning_content"] = message["reasoning"] = text
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def parse_response_body(data: object, context: int) -> ResponsesBody:
    if not isinstance(data, dict):
        raise InvalidValue("the body should be a JSON object")
    for name, reason in REFUSED.items():
        if data.get(name) not in (None, False):
            raise UnsupportedParameter(f"unsupported parameter '{name}': {reason}", param=name)
    given = {key: value for key, value in data.items() if value is not None and key not in REFUSED}
    try:
        body = ResponsesBody.model_validate(given)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None
    limit = body.max_output_tokens
    if limit is not None and limit > context:
        message = f"{limit} is more than the {context} tokens of the model's context"
        raise InvalidValue(f"invalid 'max_output_tokens': {message}", param="max_output_tokens")
    return body
