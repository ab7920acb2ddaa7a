"""POST /tokenize and /detokenize, as vLLM has them. They run nothing in the engine."""

import time
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import Field, ValidationError
from starlette.types import Send

from saccade.errors import InvalidValue
from saccade.inputs.media.cancellation import CancelToken
from saccade.request import Request, RequestTiming
from saccade.sampling_params import SamplingParams
from saccade.server.conversation import Conversation, parse_conversation
from saccade.server.generation import Generation
from saccade.server.json_body import StrictModel, send_body, validation_error
from saccade.server.message_schema import MAX_MESSAGES, ChatMessage, TextPart
from saccade.server.openai_schema import MAX_TEMPLATE_KWARGS, TemplateValue, TokenId
from saccade.server.openai_serving import ChatEncoder, message_dict
from saccade.server.request_handler import GenerationHandler, ParsedRequest, ResponseEncoder
from saccade.server.tool_schema import AtMostMaxTools, ChatTool, ToolOptions

BodyKind = TypeVar("BodyKind", bound=StrictModel)
_PARAMS = SamplingParams(max_tokens=1)


class TokenizeBody(StrictModel):
    model: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[ChatMessage] | None = Field(
        default=None, fail_fast=True, min_length=1, max_length=MAX_MESSAGES
    )
    tools: Annotated[list[ChatTool] | None, AtMostMaxTools] = Field(default=None, fail_fast=True)
    chat_template_kwargs: dict[str, TemplateValue] | None = Field(
        default=None, max_length=MAX_TEMPLATE_KWARGS
    )
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(StrictModel):
    model: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: list[TokenId] = Field(fail_fast=True)


class TokenHandler(GenerationHandler):
    """A request that ends once its prompt is prepared."""

    async def _send_json(self, value: dict[str, Any], generation: Generation, send: Send) -> None:
        headers = self._response_headers(generation, time.monotonic())
        body = msgspec.json.encode(value)
        await send_body(send, 200, body, [(b"content-type", b"application/json"), *headers])

    def _parsed(self, model: str | None, ids: list[int]) -> ParsedRequest:
        def prepare(request_id: str, salt: bytes, *, cancel: CancelToken, timing: RequestTiming) -> Request:
            return Request(id=request_id, prompt=tuple(ids))

        name = model or self.state.model_names[0]
        encoder = ChatEncoder(self.request_id, self.state.fingerprint, name)
        return ParsedRequest(name, _PARAMS, [prepare], False, False, encoder)


class TokenizeHandler(TokenHandler):
    id_prefix = "tokenize-"
    _strings = False

    def parse(self, data: object) -> ParsedRequest:
        body = _validate(TokenizeBody, data)
        self._strings = body.return_token_strs
        if (body.prompt is None) == (body.messages is None):
            raise InvalidValue("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            processor = self.state.processor
            processor.check_text(body.prompt)
            ids = processor.tokenizer.encode_plain(body.prompt, add_special_tokens=body.add_special_tokens)
            return self._parsed(body.model, ids)
        messages = body.messages or []
        contents = [one.content for one in messages if isinstance(one.content, list)]
        name = body.model or self.state.model_names[0]
        conversation = Conversation(
            model=name,
            messages=lambda: [message_dict(one) for one in messages],
            has_media=any(not isinstance(part, TextPart) for parts in contents for part in parts),
            params=_PARAMS,
            tools=ToolOptions([one.model_dump(exclude_none=True) for one in body.tools or ()]),
            template_variables=body.chat_template_kwargs or {},
        )
        encoder = ChatEncoder(self.request_id, self.state.fingerprint, name)
        return parse_conversation(self.state, conversation, encoder)

    async def _respond(
        self, generation: Generation, encoder: ResponseEncoder, stream: bool, send: Send
    ) -> None:
        request = generation.prompts[0].request
        tokens = [] if request is None else expand_placeholders(request)
        tokenizer = self.state.processor.tokenizer
        value = {
            "count": len(tokens),
            "max_model_len": self.state.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": [tokenizer.token(token) for token in tokens] if self._strings else None,
        }
        await self._send_json(value, generation, send)


class DetokenizeHandler(TokenHandler):
    id_prefix = "detokenize-"

    def parse(self, data: object) -> ParsedRequest:
        body = _validate(DetokenizeBody, data)
        info = self.state.engine.info
        if len(body.tokens) > info.max_model_len:
            message = f"{len(body.tokens)} tokens are more than the {info.max_model_len} this model holds"
            raise InvalidValue(f"invalid 'tokens': {message}; send fewer", param="tokens")
        worst = max(body.tokens, default=0)
        if worst >= info.vocab_size:
            message = f"token id {worst} is outside the vocabulary of {info.vocab_size}"
            raise InvalidValue(f"invalid 'tokens': {message}", param="tokens")
        return self._parsed(body.model, body.tokens)

    async def _respond(
        self, generation: Generation, encoder: ResponseEncoder, stream: bool, send: Send
    ) -> None:
        request = generation.prompts[0].request
        ids = () if request is None else request.prompt
        text = self.state.processor.tokenizer.decode(ids, skip_special=False)
        await self._send_json({"prompt": text}, generation, send)


def _validate(kind: type[BodyKind], data: object) -> BodyKind:
    if not isinstance(data, dict):
        raise InvalidValue("the body should be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None


def expand_placeholders(request: Request) -> list[int]:
    """The prompt as the model sees it: every placeholder once per token of its image."""
    counts = {item.placeholder: item.view.tokens for item in request.media}
    return [token for at, token in enumerate(request.prompt) for _ in range(counts.get(at, 1))]
