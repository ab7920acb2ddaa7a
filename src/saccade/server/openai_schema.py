"""What a client may ask: the OpenAI request bodies, strictly.

takes   a parsed JSON body
gives   `ChatBody` or `CompletionBody`, every value inside its limit, or `InvalidValue` naming the parameter
never   guesses: a string is not a number, 1.0 is not an integer, an unknown field is an error

| parameter                            | accepted                                                          |
|--------------------------------------|-------------------------------------------------------------------|
| messages                             | 1 to 4096, each of at most 1024 parts                             |
| prompt                               | a string, token ids, or up to 64 of either; none of them empty    |
| n                                    | 1 to the server's max_choices                                     |
| max_tokens, max_completion_tokens    | 1 to the model's context; lowered to what the prompt leaves of it  |
| min_tokens                           | 0 to max_tokens                                                   |
| temperature                          | 0 to 2                                                            |
| top_p, min_p                         | above 0 up to 1; 0 to 1                                           |
| top_k                                | -1 or 0 (off), or 1 and more                                      |
| repetition_penalty                   | 0.01 to 10                                                        |
| presence_penalty, frequency_penalty  | -2 to 2                                                           |
| seed                                 | -2**63 to 2**63 - 1                                               |
| logit_bias                           | 1024 entries, ids inside the vocabulary, -100 to 100              |
| top_logprobs; logprobs (completions) | 0 to 20                                                           |
| stop                                 | a string or up to 16, each of 1 to 256 characters                 |
| stop_token_ids                       | 256 ids inside the vocabulary                                     |
| image_url.detail                     | low, medium, high, auto                                           |
| visual_tokens                        | 1 and more, for all pictures together                             |
| lod                                  | true or false: level of detail                                    |
| model, user                          | 256, 512 characters                                               |
| a number anywhere                    | finite; booleans and strings are not numbers                      |
"""

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from saccade.errors import InvalidValue
from saccade.lod.detail import Wishes
from saccade.sampling_params import LIMITS, MAX_LOGPROBS, MAX_SEED, MAX_STOPS, SamplingParams
from saccade.server.chat_messages import Message, TextPart, by_shape
from saccade.server.strict_json import Strict, refusal

MAX_MESSAGES = 4096
MAX_PROMPTS = 64
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class StreamOptions(Strict):
    include_usage: bool = False


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value != "text":
            raise PydanticCustomError("unsupported", "structured output is not supported; use 'text'")
        return value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("~string")]
    | Annotated[list[StopString], Tag("~parts"), Field(max_length=MAX_STOPS, fail_fast=True)],
    Discriminator(
        by_shape, custom_error_type="stop", custom_error_message="should be a string or a list of strings"
    ),
]
# fail_fast: a million wrong items are one error, not a million.
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=LIMITS["logit_bias"][0], le=LIMITS["logit_bias"][1])]


def _within(name: str) -> Any:
    """A number that may be left out, within the limits the library has for it."""
    least, most = LIMITS[name]
    return Field(default=None, ge=least, le=most)


class _Body(Strict):
    """What both bodies share. None: the checkpoint's default, or off."""

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = _within("temperature")
    top_p: float | None = Field(default=None, gt=LIMITS["top_p"][0], le=LIMITS["top_p"][1])
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = _within("min_p")
    repetition_penalty: float | None = _within("repetition_penalty")
    presence_penalty: float | None = _within("presence_penalty")
    frequency_penalty: float | None = _within("frequency_penalty")
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=MAX_BIASES)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(fail_fast=True, default=None, max_length=MAX_STOP_IDS)
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    min_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, lt=1 << 31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None reports no log-probabilities at all."""
        raise NotImplementedError


class ChatBody(_Body):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    visual_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    lod: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _by_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "~string"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "~strings" if isinstance(first, str) else "~lists" if isinstance(first, list) else "~ids"


Prompt = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionBody(_Body):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[Prompt, Tag("~string")]
        | Annotated[PromptIds, Tag("~ids")]
        | Annotated[list[Prompt], Tag("~strings"), Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Tag("~lists"), Field(max_length=MAX_PROMPTS, fail_fast=True)],
        Discriminator(
            _by_prompt,
            custom_error_type="prompt",
            custom_error_message="should be a string, token ids, or a list of either, and not be empty",
        ),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, however they were given."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


# --- checks that need more than one field, or the server ------------------------------------------------

Body = ChatBody | CompletionBody


def read(
    kind: type[ChatBody] | type[CompletionBody],
    data: object,
    *,
    max_choices: int,
    vocab_size: int,
    context: int,
) -> Body:
    """The body, or InvalidValue naming what is wrong with it."""
    if not isinstance(data, dict):
        raise InvalidValue("the body should be a JSON object")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None
    _check_together(body, max_choices, vocab_size, context)
    return body


def has_media(body: Body) -> bool:
    """Whether a picture or video must be loaded for it."""
    return isinstance(body, ChatBody) and any(
        not isinstance(part, TextPart)
        for message in body.messages
        if not isinstance(message.content, str)
        for part in message.content
    )


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidValue(f"invalid '{param}': {message}", param=param)


def _check_together(body: Body, max_choices: int, vocab_size: int, context: int) -> None:
    limit, least = body.token_limit, body.min_tokens or 0
    named = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    _require(
        limit is None or limit <= context,
        "max_completion_tokens" if named else "max_tokens",
        f"{limit} is more than the {context} tokens the model's context holds",
    )
    _require((body.n or 1) <= max_choices, "n", f"{body.n} choices are more than the {max_choices} allowed")
    _require(
        body.stream_options is None or body.stream is True,
        "stream_options",
        "it is only allowed together with stream: true",
    )
    _require(limit is None or least <= limit, "min_tokens", f"{least} is more than the {limit} of max_tokens")
    for token in body.stop_token_ids or ():
        _check_id(token, vocab_size, "stop_token_ids")
    for key in body.logit_bias or ():
        plain = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
        _require(plain, "logit_bias", f"{key[:20]!r} is no token id")
        _check_id(int(key), vocab_size, "logit_bias")
    if isinstance(body, ChatBody):
        both = body.max_tokens is not None and body.max_completion_tokens is not None
        _require(
            not both or body.max_tokens == body.max_completion_tokens,
            "max_tokens",
            f"{body.max_tokens} contradicts max_completion_tokens, {body.max_completion_tokens}; give one",
        )
        _require(
            body.top_logprobs is None or body.logprobs is True,
            "top_logprobs",
            "it is only allowed together with logprobs: true",
        )
        return
    _require(not body.echo, "echo", "echoing the prompt is not supported")
    for prompt in body.prompts:
        if not isinstance(prompt, str):
            _check_id(max(prompt), vocab_size, "prompt")


def _check_id(token: int, vocab_size: int, param: str) -> None:
    _require(token < vocab_size, param, f"token id {token} is outside the vocabulary of {vocab_size}")


def wishes_of(body: ChatBody, *, only_look: bool = False) -> Wishes:
    """What it asks of the detail pictures are seen in; each picture's own is in the messages."""
    return Wishes(lod=body.lod, visual_tokens=body.visual_tokens, only_look=only_look)


def sampling_of(body: Body) -> SamplingParams:
    """The same wishes in the words of the library."""
    return SamplingParams(
        max_tokens=body.token_limit,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=body.alternatives,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
        n=body.n or 1,
    )
