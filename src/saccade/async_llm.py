"""`AsyncEngine`: an engine core in its own process, for asyncio programs.

    async with AsyncEngine("embedded") as engine:
        async for delta in engine.chat(messages, SamplingParams(max_tokens=64)):
            print(delta.text, end="")

Any number of tasks may use it at once. Decoding and tokenising run in threads.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, MediaLimits
from saccade.engine.client import EngineClient
from saccade.engine.ipc import EngineInfo
from saccade.errors import EngineDied, engine_error
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.output_processor import TextDelta
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.preview import Preview, make_preview
from saccade.lod.types import LodParams
from saccade.request import Request
from saccade.sampling_params import SamplingParams

_Prepare = Callable[[CancelToken], Request]


class AsyncEngine:
    """Options are those of `EngineConfig`."""

    def __init__(self, model: str, *, media: MediaLimits | None = None, **options: Any) -> None:
        self._config = EngineConfig(model=model, **options)
        self._limits = media or MediaLimits()
        self._client = EngineClient(self._config)
        self._processor: InputProcessor | None = None
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    async def start(self) -> None:
        checkpoint = await asyncio.to_thread(open_checkpoint, self._config.model)
        await self._client.start()
        try:
            max_model_len = self._client.info.max_model_len
            self._processor = await asyncio.to_thread(InputProcessor, checkpoint, max_model_len, self._limits)
        except BaseException:
            await self._client.stop()
            raise

    async def stop(self) -> None:
        """End the engine process; open streams raise EngineDied."""
        if self._processor is not None:
            self._processor.close()
        await self._client.stop()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        lod: LodParams | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Answer a conversation of OpenAI messages; images may also be objects, paths or bytes.

        Without `lod`, images have the detail their parts ask for. Closing the stream cancels the request.
        """
        params = params or SamplingParams()
        return self._stream(self._prepare_chat(messages, params, DetailRequest(params=lod)), params)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        lod: LodParams | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Complete a prompt with one placeholder token per image and video."""
        params = params or SamplingParams()
        prepare = partial(
            self._started_processor().prepare_prompt,
            prompt,
            params,
            self._next_id(),
            images=images,
            videos=videos,
            trusted=True,
            detail_req=DetailRequest(params=lod),
        )
        return self._stream(lambda cancel: prepare(cancel=cancel), params)

    async def look(self, messages: Sequence[Mapping[str, Any]], *, lod: LodParams | None = None) -> Preview:
        """Where the last question looks and what LOD would zoom into, without an answer."""
        detail_req = DetailRequest(params=lod or LodParams(), preview_only=True)
        request = await _run_in_thread(self._prepare_chat(messages, SamplingParams(max_tokens=1), detail_req))
        async with aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                if delta.zoomed is not None:
                    return make_preview(request, delta.zoomed)
        raise EngineDied("the engine ended the preview early")

    def _prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, detail_req: DetailRequest
    ) -> _Prepare:
        processor, request_id = self._started_processor(), self._next_id()
        return lambda cancel: processor.prepare_chat(
            messages, params, request_id, trusted=True, cancel=cancel, detail_req=detail_req
        )

    def _started_processor(self) -> InputProcessor:
        if self._processor is None:
            raise EngineDied("the engine has not been started; use `async with AsyncEngine(...)`")
        return self._processor

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    async def _stream(self, prepare: _Prepare, params: SamplingParams) -> AsyncGenerator[TextDelta]:
        request = await _run_in_thread(prepare)
        output = self._started_processor().output_processor(request, params)
        async with aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                text_delta = output.push(delta)
                if text_delta is not None:
                    yield text_delta
                if output.done:
                    return


async def _run_in_thread(prepare: _Prepare) -> Request:
    cancel = CancelToken()
    try:
        return await asyncio.to_thread(prepare, cancel)
    except asyncio.CancelledError:
        cancel.cancel()
        raise
