"""POST /v1/lod/preview: where a question looks and which regions it would zoom into, without an answer.

The request ends once its views are chosen. Chat parameters that only affect an answer are refused.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec
from starlette.types import Send

from saccade.errors import InvalidValue, Overloaded
from saccade.inputs.media.cancellation import CancelToken
from saccade.lod.preview import Preview, make_preview
from saccade.request import Request, RequestTiming
from saccade.server.generation import Generation, ServerState
from saccade.server.json_body import UnsupportedParameter, send_body
from saccade.server.openai_schema import ChatBody
from saccade.server.openai_serving import ChatHandler
from saccade.server.request_handler import ParsedRequest, ResponseEncoder

USED_FIELDS = frozenset(("model", "messages", "visual_tokens", "lod", "user", "format", "png"))


class PreviewBody(ChatBody):
    format: Literal["json", "png"] | None = None
    png: bool | None = None  # with format json: include the annotated images

    @property
    def token_limit(self) -> int:
        return 1  # the least a request may ask for; it ends before


def _refuse_unused(body: PreviewBody) -> None:
    for name in sorted(body.model_fields_set - USED_FIELDS):
        if getattr(body, name) is not None:
            reason = "a preview generates no answer; leave it out"
            raise UnsupportedParameter(f"unsupported parameter '{name}': {reason}", param=name)
    if body.format == "png" and body.png is not None:
        raise InvalidValue("png is for the json format, and format is 'png'; leave one out", param="png")


class PreviewHandler(ChatHandler):
    def __init__(self, state: ServerState) -> None:
        super().__init__(state)
        self._request: Request | None = None
        self._encode: partial[tuple[bytes, bytes]] = partial(_encode_preview)

    def parse(self, data: object) -> ParsedRequest:
        body = self._parse_body(PreviewBody, data)
        _refuse_unused(body)
        self._encode = partial(_encode_preview, model=body.model, as_png=body.format == "png", png=body.png)
        parsed = self._parsed_chat(body, preview_only=True)
        (prepare,) = parsed.prompts

        def prepare_and_keep(
            request_id: str, salt: bytes, *, cancel: CancelToken, timing: RequestTiming
        ) -> Request:  # the preview is drawn on its pixels
            self._request = prepare(request_id, salt, cancel=cancel, timing=timing)
            return self._request

        return replace(parsed, prompts=[prepare_and_keep])

    async def _respond(
        self, generation: Generation, encoder: ResponseEncoder, stream: bool, send: Send
    ) -> None:
        await generation.run()
        zoomed, request = generation.prompts[0].output.zoomed, self._request
        if zoomed is None or request is None:
            raise Overloaded("the engine ended this preview early; send the request again")
        encode = partial(self._encode, make_preview(request, zoomed))
        loop = asyncio.get_running_loop()
        content_type, body = await loop.run_in_executor(self.state.media_threads, encode)
        headers = self._response_headers(generation, time.monotonic())
        await send_body(send, 200, body, [(b"content-type", content_type), *headers])


def _encode_preview(preview: Preview, *, model: str, as_png: bool, png: bool | None) -> tuple[bytes, bytes]:
    """Content type and body."""
    if as_png:
        return b"image/png", preview.png(0)
    values = {"object": "lod.preview", "model": model, **preview.values(png=png is not False)}
    return b"application/json", msgspec.json.encode(values)
