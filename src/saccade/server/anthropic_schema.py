"""Anthropic request bodies for messages and count_tokens: fields, limits, conversion to OpenAI's messages."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from saccade.errors import InvalidValue
from saccade.inputs.chat_template import Scalar
from saccade.sampling_params import LIMITS, MAX_STOPS, SamplingParams
from saccade.server.conversation import effort_variables
from saccade.server.json_body import StrictModel, validation_error
from saccade.server.message_schema import MAX_MESSAGES, MAX_PARTS, check_part, tag_by
from saccade.server.openai_schema import MAX_INT, MAX_STOP_CHARS, Effort
from saccade.server.tool_schema import AtMostMaxTools, JsonObject, ToolName, ToolOptions

MIN_THINKING_BUDGET = 1024  # Anthropic's


class CacheControl(StrictModel):
    """Accepted without effect: the prefix cache needs no marks."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class AnthropicBlock(StrictModel):
    cache_control: CacheControl | None = None


class TextBlock(AnthropicBlock):
    type: Literal["text"]
    text: str
    citations: None = None
    parsed_output: None = None  # of blocks that the client's stream helper built


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str = Field(min_length=1)


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str = Field(min_length=1)


Source = Annotated[
    Annotated[Base64Source, Tag("~base64")] | Annotated[UrlSource, Tag("~url")],
    tag_by("type"),
    check_part("as the source of an image", "base64", "url"),
]


class ImageBlock(AnthropicBlock):
    type: Literal["image"]
    source: Source


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(AnthropicBlock):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    input: JsonObject
    caller: Any = None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("~text")] | Annotated[ImageBlock, Tag("~image")],
    tag_by("type"),
    check_part("in a tool's result", "text", "image"),
]


def _tag_by_shape(value: Any) -> str | None:
    return "~string" if isinstance(value, str) else "~blocks" if isinstance(value, list) else None


_CONTENT = Discriminator(
    _tag_by_shape, custom_error_type="content", custom_error_message="should be a string or a list of blocks"
)
PlainText = Annotated[str, Tag("~string")]


class ToolResultBlock(AnthropicBlock):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: (
        Annotated[
            PlainText
            | Annotated[list[ResultBlock], Tag("~blocks"), Field(max_length=MAX_PARTS, fail_fast=True)],
            _CONTENT,
        ]
        | None
    ) = None
    is_error: bool | None = None


MessageBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ImageBlock, Tag("~image")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")],
    tag_by("type"),
    check_part("here", "text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[
    list[MessageBlock], Tag("~blocks"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]
TextBlocks = Annotated[list[TextBlock], Tag("~blocks"), Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant"]
    content: Annotated[PlainText | Blocks, _CONTENT]


class AnthropicTool(AnthropicBlock):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=MIN_THINKING_BUDGET, le=MAX_INT)
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(StrictModel):
    effort: Effort | None = None


class AnthropicMetadata(StrictModel):
    user_id: str | None = Field(default=None, max_length=512)


class CountTokensBody(StrictModel):
    """POST /v1/messages/count_tokens"""

    model: str = Field(min_length=1, max_length=256)
    messages: list[AnthropicMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    system: Annotated[PlainText | TextBlocks, _CONTENT] | None = None
    tools: Annotated[list[AnthropicTool] | None, AtMostMaxTools] = Field(default=None, fail_fast=True)
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOptions | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinks and (self.thinking is None or self.thinking.display != "omitted")

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def template_variables(self) -> dict[str, Scalar]:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        effort = self.output_config.effort if self.output_config is not None else None
        variables: dict[str, Scalar] = {**effort_variables(effort), "enable_thinking": self.thinks}
        return variables if budget is None else {**variables, "thinking_budget": budget}

    @property
    def tool_options(self) -> ToolOptions:
        given = self.tool_choice
        kind = given.type if given is not None else "auto"
        names = {"any": "required", "tool": (given.name or "") if given is not None else ""}
        return ToolOptions(
            tools=[_tool(one) for one in self.tools or ()],
            choice=names.get(kind, kind),
            named=kind == "tool",
            parallel=given is None or not given.disable_parallel_tool_use,
        )

    @property
    def has_media(self) -> bool:
        blocks = [block for one in self.messages if isinstance(one.content, list) for block in one.content]
        inner = [
            part
            for block in blocks
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
            for part in block.content
        ]
        return any(isinstance(block, ImageBlock) for block in (*blocks, *inner))

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI's messages."""
        messages: list[dict[str, Any]] = []
        if self.system:
            parts = self.system if isinstance(self.system, list) else None
            text = "\n\n".join(one.text for one in parts) if parts is not None else self.system
            messages.append({"role": "system", "content": text})
        for message in self.messages:
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            elif message.role == "assistant":
                messages.append(_assistant_message(message.content))
            else:
                messages.extend(_user_messages(message.content))
        return messages


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    temperature: float | None = Field(default=None, ge=0, le=LIMITS["temperature"][1])
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MAX_INT)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] | None = Field(
        default=None, max_length=MAX_STOPS, fail_fast=True
    )
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences or ()),
        )


def parse_messages(kind: type[CountTokensBody], data: object, context: int) -> CountTokensBody:
    if not isinstance(data, dict):
        raise InvalidValue("the body should be a JSON object")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None
    choice, thinking = body.tool_choice, body.thinking
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise InvalidValue("invalid 'tool_choice': give a name with the type 'tool', and only then")
    if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise InvalidValue("invalid 'thinking': give budget_tokens with the type 'enabled', and only then")
    if isinstance(body, MessagesBody):
        limit = body.max_tokens
        if limit > context:
            raise InvalidValue(
                f"invalid 'max_tokens': {limit} is more than the {context} tokens of the model's context"
            )
        budget = thinking.budget_tokens if thinking is not None else None
        if budget is not None and budget >= limit:
            raise InvalidValue(
                f"invalid 'thinking.budget_tokens': {budget} should be less than the {limit} of max_tokens"
            )
    return body


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant_message(blocks: list[MessageBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise InvalidValue(f"content[{number}]: {block.type} blocks belong into a user's message")
    if calls:
        message["tool_calls"] = calls
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]
    return message


def _user_messages(blocks: list[MessageBlock]) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, in their place among the other blocks."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            content: Any = block.content or ""
            if isinstance(content, list):
                content = [_part(one) for one in content]
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock | ImageBlock):
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_part(block))
        else:
            raise InvalidValue(f"content[{number}]: {block.type} blocks belong into an assistant's message")
    return messages
