"""OpenAI request bodies for chat completions and completions: fields, limits, conversion to SamplingParams.

docs/serving.md lists every parameter with its range.
"""

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from saccade.errors import InvalidValue
from saccade.inputs.chat_template import Scalar
from saccade.sampling_params import LIMITS, MAX_LOGPROBS, MAX_SEED, MAX_STOPS, SamplingParams
from saccade.server.conversation import effort_variables
from saccade.server.json_body import StrictModel, validation_error
from saccade.server.message_schema import MAX_MESSAGES, ChatMessage, tag_by_shape
from saccade.server.tool_schema import (
    AtMostMaxTools,
    ChatTool,
    Choice,
    NamedChoice,
    ToolOptions,
)

MAX_PROMPTS = 64
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_INT = (1 << 31) - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MAX_TEMPLATE_KWARGS = 32
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# --- bodies --------------------------------------------------------------------------------------------


class StreamOptions(StrictModel):
    include_usage: bool = False


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value != "text":
            raise PydanticCustomError("unsupported", "structured output is not supported; use 'text'")
        return value


def _check_scalar(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise PydanticCustomError("scalar", "should be a string, a number, true, false or null")
    return value


TemplateValue = Annotated[Any, BeforeValidator(_check_scalar)]
ChatToolChoice = Annotated[
    Annotated[Choice, Tag("~string")] | Annotated[NamedChoice, Tag("~named")],
    Discriminator(
        lambda value: "~string" if isinstance(value, str) else "~named",
        custom_error_type="choice",
        custom_error_message="should be 'none', 'auto', 'required' or a function",
    ),
]

# fail_fast: a list of a million wrong items gives one error, not a million.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("~string")]
    | Annotated[list[StopString], Tag("~parts"), Field(max_length=MAX_STOPS, fail_fast=True)],
    Discriminator(
        tag_by_shape,
        custom_error_type="stop",
        custom_error_message="should be a string or a list of strings",
    ),
]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=LIMITS["logit_bias"][0], le=LIMITS["logit_bias"][1])]


def _optional_within(name: str) -> Any:
    low, high = LIMITS[name]
    return Field(default=None, ge=low, le=high)


class GenerationBody(StrictModel):
    """Fields of both APIs. None takes the checkpoint's default, or off."""

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = _optional_within("temperature")
    top_p: float | None = Field(default=None, gt=LIMITS["top_p"][0], le=LIMITS["top_p"][1])
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = _optional_within("min_p")
    repetition_penalty: float | None = _optional_within("repetition_penalty")
    presence_penalty: float | None = _optional_within("presence_penalty")
    frequency_penalty: float | None = _optional_within("frequency_penalty")
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=MAX_BIASES)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(fail_fast=True, default=None, max_length=MAX_STOP_IDS)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_INT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None reports no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            logprobs=self.num_logprobs,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos or False,
            n=self.n or 1,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatTool] | None, AtMostMaxTools] = Field(default=None, fail_fast=True)
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = Field(
        default=None, max_length=MAX_TEMPLATE_KWARGS
    )
    visual_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    lod: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_options(self) -> ToolOptions:
        choice, named = self.tool_choice or "auto", isinstance(self.tool_choice, NamedChoice)
        return ToolOptions(
            tools=[one.model_dump(exclude_none=True) for one in self.tools or ()],
            choice=choice.function.name if isinstance(choice, NamedChoice) else choice,
            named=named,
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def template_variables(self) -> dict[str, Scalar]:
        return {**effort_variables(self.reasoning_effort), **(self.chat_template_kwargs or {})}


def _tag_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "~string"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "~strings" if isinstance(first, str) else "~lists" if isinstance(first, list) else "~ids"


PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[PromptText, Tag("~string")]
        | Annotated[PromptIds, Tag("~ids")]
        | Annotated[list[PromptText], Tag("~strings"), Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Tag("~lists"), Field(max_length=MAX_PROMPTS, fail_fast=True)],
        Discriminator(
            _tag_prompt,
            custom_error_type="prompt",
            custom_error_message="should be a string, token ids, or a list of either, and not be empty",
        ),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


# --- checks across fields and against the server --------------------------------------------------------

BodyType = TypeVar("BodyType", bound=GenerationBody)


def parse_body(
    kind: type[BodyType], data: object, *, max_choices: int, vocab_size: int, context: int
) -> BodyType:
    """The validated body; InvalidValue names the parameter that is wrong."""
    if not isinstance(data, dict):
        raise InvalidValue("the body should be a JSON object")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None
    _check_generation(body, max_choices, vocab_size, context)
    if isinstance(body, ChatBody):
        old, new = body.max_tokens, body.max_completion_tokens
        agree = None in (old, new) or old == new
        _require(agree, "max_tokens", f"{old} contradicts max_completion_tokens, {new}; give one")
        _require(body.tool_choice is None or bool(body.tools), "tool_choice", "it is only allowed with tools")
        allowed = body.top_logprobs is None or body.logprobs is True
        _require(allowed, "top_logprobs", "it is only allowed together with logprobs: true")
    elif isinstance(body, CompletionBody):
        _require(not body.echo, "echo", "echoing the prompt is not supported")
        for prompt in body.prompts:
            if not isinstance(prompt, str):
                _check_token_id(max(prompt), vocab_size, "prompt")
    return body


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidValue(f"invalid '{param}': {message}", param=param)


def _check_token_id(token: int, vocab_size: int, param: str) -> None:
    _require(token < vocab_size, param, f"token id {token} is outside the vocabulary of {vocab_size}")


def _check_generation(body: GenerationBody, max_choices: int, vocab_size: int, context: int) -> None:
    limit, least = body.token_limit, body.min_tokens or 0
    if limit is not None:
        renamed = isinstance(body, ChatBody) and body.max_completion_tokens is not None
        param = "max_completion_tokens" if renamed else "max_tokens"
        _require(limit <= context, param, f"{limit} is more than the {context} tokens of the model's context")
        _require(least <= limit, "min_tokens", f"{least} is more than the {limit} of max_tokens")
    _require((body.n or 1) <= max_choices, "n", f"{body.n} choices are more than the {max_choices} allowed")
    allowed = body.stream_options is None or body.stream is True
    _require(allowed, "stream_options", "it is only allowed together with stream: true")
    for token in body.stop_token_ids or ():
        _check_token_id(token, vocab_size, "stop_token_ids")
    for key in body.logit_bias or ():
        decimal = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
        _require(decimal, "logit_bias", f"{key[:20]!r} is no token id")
        _check_token_id(int(key), vocab_size, "logit_bias")
