"""POST /v1/lod/preview: where a question looks, without the answer.

takes   a chat body; `format` json (maps and plan, with the annotated pictures as data URLs) or png (the first
        picture, annotated)
gives   what `saccade.lod.preview` makes of it
never   generates a token: the request ends in the engine once its views are chosen; what a chat body may ask
        of an answer is refused
"""

import asyncio
import time
from functools import partial
from typing import Literal

import msgspec
from pydantic import Field

from saccade.errors import InvalidValue, Overloaded
from saccade.lod.detail import Wishes
from saccade.lod.preview import Preview, preview_of
from saccade.request import Request
from saccade.server.asgi import Send, send_json
from saccade.server.generation import Generation
from saccade.server.openai_schema import Body, ChatBody, wishes_of
from saccade.server.openai_serving import Asked, GenerationExchange, Terms, ignore
from saccade.server.state import Service
from saccade.server.strict_json import UnsupportedParameter

# What a preview goes by; the rest of a chat body is about an answer, of which there is none.
HEEDED = frozenset(("model", "messages", "visual_tokens", "lod", "user", "format", "png"))


class PreviewBody(ChatBody):
    """A chat body that may also say what it wants back."""

    format: Literal["json", "png"] | None = None
    png: bool | None = Field(default=None)  # in JSON: with the annotated pictures

    @property
    def token_limit(self) -> int:
        return 1  # the least a request may ask for: it ends before


def refuse_unheeded(body: Body) -> None:
    """Raise for what was asked and would change nothing; a null is the same as not asking."""
    for name in sorted(body.model_fields_set - HEEDED):
        if getattr(body, name) is not None:
            why = "a preview only looks, and gives no answer; leave it out"
            raise UnsupportedParameter(f"unsupported parameter '{name}': {why}", param=name)
    if isinstance(body, PreviewBody) and body.format == "png" and body.png is not None:
        raise InvalidValue("png is for the json format, and format is 'png'; leave one out", param="png")


class PreviewExchange(GenerationExchange):
    def __init__(self, service: Service) -> None:
        super().__init__(service, PreviewBody)
        self._request: Request | None = None

    def _read(self) -> Asked:
        asked = super()._read()
        refuse_unheeded(asked.body)
        return asked

    def _wishes(self, body: ChatBody) -> Wishes:
        return wishes_of(body, only_look=True)

    def _prepared(self, request: Request) -> Request:
        self._request = request  # its pixels are drawn on
        return request

    async def _generate(self, terms: Terms, generation: Generation, send: Send) -> None:
        try:
            await generation.run(ignore)
        finally:
            generation.observe_end()
        zoomed, request = generation.zoomed, self._request
        if zoomed is None or request is None:
            raise Overloaded("the engine ended this look early; try again")
        write = partial(_written, preview_of(request, zoomed), terms)
        kind, body = await asyncio.get_running_loop().run_in_executor(self._service.loaders, write)
        timing = (b"server-timing", generation.stages.header(time.monotonic()))
        await send_json(send, 200, body, [(b"content-type", kind), self._mark, timing])


def _written(preview: Preview, terms: Terms) -> tuple[bytes, bytes]:
    body = terms.body
    if isinstance(body, PreviewBody) and body.format == "png":
        return b"image/png", preview.png(0)
    drawn = not isinstance(body, PreviewBody) or body.png is not False
    values = {"object": "lod.preview", "model": body.model, **preview.values(png=drawn)}
    return b"application/json", msgspec.json.encode(values)
