"""For asyncio programs: an engine process and the front that prepares its requests, as one object.

    async with AsyncEngine("embedded") as engine:
        async for piece in engine.chat(messages, SamplingParams(max_tokens=64)):
            print(piece.text, end="")

takes   conversations and prompts, from any number of tasks at once
gives   a stream of `TextDelta`s for each; leaving a stream early cancels its request
owns    the engine process
never   blocks the event loop: decoding and tokenising happen in threads
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, MediaLimits
from saccade.engine.client import ProcessLink
from saccade.engine.ipc import EngineInfo
from saccade.errors import EngineDied, engine_error
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.output_processor import TextDelta
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import Wishes
from saccade.lod.preview import Preview, preview_of
from saccade.lod.types import LodParams
from saccade.request import Request
from saccade.sampling_params import SamplingParams


class AsyncEngine:
    """Options are those of `EngineConfig`, by name."""

    def __init__(self, model: str, *, media: MediaLimits | None = None, **options: Any) -> None:
        self._config = EngineConfig(model=model, **options)
        self._limits = media or MediaLimits()
        self._link = ProcessLink(self._config)
        self._front: InputProcessor | None = None
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def info(self) -> EngineInfo:
        return self._link.info

    async def start(self) -> None:
        checkpoint = await asyncio.to_thread(open_checkpoint, self._config.model)
        await self._link.start()
        try:
            make = partial(InputProcessor, checkpoint, self._link.info.max_model_len, self._limits)
            self._front = await asyncio.to_thread(make)
        except BaseException:
            await self._link.stop()
            raise

    async def stop(self) -> None:
        """Ends the engine process; streams that are still open raise EngineDied."""
        if self._front is not None:
            self._front.close()
        await self._link.stop()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        lod: LodParams | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Answer a conversation of OpenAI messages; pictures may also be objects, paths and bytes. Without
        `lod` they are seen as their parts say, which is in full if these say nothing."""
        front, params = self._ready(), params or SamplingParams()
        prepare = self._chat(front, messages, params, cancel := CancelToken(), Wishes(params=lod))
        return self._stream(front, prepare, params, cancel)

    async def look(self, messages: Sequence[Mapping[str, Any]], *, lod: LodParams | None = None) -> Preview:
        """Where the last question looks, and what would be zoomed; no answer."""
        front, params, cancel = self._ready(), SamplingParams(max_tokens=1), CancelToken()
        wishes = Wishes(params=lod or LodParams(), only_look=True)
        request = await _in_thread(self._chat(front, messages, params, cancel, wishes), cancel)
        async with aclosing(self._link.generate(request)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                if delta.zoomed is not None:
                    return preview_of(request, delta.zoomed)
        raise EngineDied("the engine ended the look early")

    def _chat(
        self,
        front: InputProcessor,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        cancel: CancelToken,
        wishes: Wishes,
    ) -> Callable[[], Request]:
        return partial(
            front.prepare_chat, messages, params, self._name(), trusted=True, cancel=cancel, wishes=wishes
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        lod: LodParams | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Continue a prompt, with one placeholder token per picture and video."""
        front, params = self._ready(), params or SamplingParams()
        media: dict[str, Any] = {
            "images": images,
            "videos": videos,
            "trusted": True,
            "cancel": (cancel := CancelToken()),
            "wishes": Wishes(params=lod),
        }
        prepare = partial(front.prepare_prompt, prompt, params, self._name(), **media)
        return self._stream(front, prepare, params, cancel)

    def _ready(self) -> InputProcessor:
        if self._front is None:
            raise EngineDied("the engine has not been started; use `async with AsyncEngine(...)`")
        return self._front

    def _name(self) -> str:
        return f"request-{next(self._numbers)}"

    async def _stream(
        self,
        front: InputProcessor,
        prepare: Callable[[], Request],
        params: SamplingParams,
        cancel: CancelToken,
    ) -> AsyncGenerator[TextDelta]:
        request = await _in_thread(prepare, cancel)
        answer = front.output_processor(request, params)
        async with aclosing(self._link.generate(request)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                piece = answer.push(delta)
                if piece is not None:
                    yield piece
                if answer.done:
                    return


async def _in_thread(prepare: Callable[[], Request], cancel: CancelToken) -> Request:
    try:
        return await asyncio.to_thread(prepare)
    except asyncio.CancelledError:
        cancel.cancel()  # nobody waits any more for what the thread is loading
        raise
