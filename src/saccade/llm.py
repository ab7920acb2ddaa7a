"""`LLM`: the engine core in this process, for batches of prompts or conversations.

llm = LLM("embedded")
outputs = llm.generate([{"prompt": ..., "images": [image]}], SamplingParams(max_tokens=64))
"""

import itertools
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, MediaLimits
from saccade.engine.core import Engine
from saccade.errors import InvalidValue, engine_error
from saccade.host.garbage_collection import existing_objects_frozen
from saccade.inputs.media.loader import SharedImage
from saccade.inputs.output_processor import CompletionOutput, OutputProcessor, Usage
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.types import LodParams
from saccade.request import Request, ZoomResult
from saccade.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "images", "videos", "lod"))
Item = TypeVar("Item")
# Threads that decode images and tokenise, mostly without the interpreter lock: on two cores four were faster
# than two.
NUM_THREADS = min(8, max(4, (os.cpu_count() or 1) // 2))
# Python's thread switch interval while they run. The engine's thread releases the interpreter lock with every
# kernel launch. For 128 image questions on two cores all launches took 164 ms at best and 244 in the median;
# with the default of 5 ms, 213 and 275.
SWITCH_SECONDS = 2e-4
# Requests the first step waits for. Only they are prepared before it, then twice as many with every step:
# preparing all of them at once delayed the first step by 50 ms.
FIRST_STEP_REQUESTS = 32


@dataclass(frozen=True)
class RequestOutput:
    """The output for one prompt; `outputs[i]` has token_ids, text, finish_reason and logprobs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # one placeholder per image
    outputs: list[CompletionOutput]
    usage: Usage
    zoomed: ZoomResult | None = None  # the views chosen by LOD


class LLM:
    """A loaded model. Options are those of `EngineConfig`; `itl_target` is off unless given."""

    def __init__(
        self, model: str, *, media: MediaLimits | None = None, progress: bool = True, **options: Any
    ) -> None:
        self._progress = progress
        if options.get("itl_target") is None:
            options["itl_target"] = 0.0  # nothing streams: the largest steps are the fastest
        self.engine = Engine(EngineConfig(model=model, **options), progress=progress)
        limits = media or MediaLimits()
        self.processor = InputProcessor(open_checkpoint(model), self.engine.info.max_model_len, limits)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lod: LodParams | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, token ids, or dicts.

        A dict has `prompt` or `prompt_token_ids`, and may have `images`, `videos` and `lod` (LodParams that
        replace the call's; without either, images have full detail). Prompts are prepared while earlier ones
        run. An invalid one raises and cancels the whole call.
        """
        prompt_list = _prompt_list(prompts)
        shared = _shared_images(prompt_list)

        def prepare(prompt: Prompt, sampling: SamplingParams, request_id: str) -> Request:
            parts = _prompt_parts(prompt)
            images = parts.get("images", ())
            if isinstance(images, list | tuple):
                images = [shared.get(id(image), image) for image in images]
            return self.processor.prepare_prompt(
                parts["prompt"] if "prompt" in parts else parts["prompt_token_ids"],
                sampling,
                request_id,
                images=images,
                videos=parts.get("videos", ()),
                trusted=True,
                detail_req=DetailRequest(params=parts.get("lod", lod)),
            )

        return self._run_batch(prompt_list, params, prepare, progress)

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lod: LodParams | Sequence[LodParams | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of OpenAI messages) or several (a list of such lists).

        `lod` is one for all of them, or one for each; without it, images have the detail their parts ask for.
        """
        if not messages:
            raise InvalidValue("messages is empty; give at least one message", param="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        lods = _one_for_each(lod, len(conversations), None, "levels of detail")

        def prepare(item: tuple[Any, LodParams | None], sampling: SamplingParams, request_id: str) -> Request:
            conversation, params = item
            return self.processor.prepare_chat(
                conversation, sampling, request_id, trusted=True, detail_req=DetailRequest(params=params)
            )

        return self._run_batch(list(zip(conversations, lods, strict=True)), params, prepare, progress)

    def close(self) -> None:
        self.processor.close()
        self.engine.close()

    def _run_batch(
        self,
        items: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[Any, SamplingParams, str], Request],
        progress: bool | None,
    ) -> list[RequestOutput]:
        each = _one_for_each(params, len(items), SamplingParams(), "sampling parameters")
        ids = [f"request-{next(self._numbers)}" for _ in items]
        show = self._progress if progress is None else progress
        with (
            _InlineExecutor() if len(items) == 1 else _worker_threads() as executor,
            _progress_bar(len(items), show=show and len(items) > 1) as advance,
            existing_objects_frozen(),
        ):
            window = 2 * self.engine.info.max_num_seqs
            pending = _PendingRequests(executor, prepare, list(zip(items, each, ids, strict=True)), window)
            outputs: dict[str, OutputProcessor] = {}
            try:
                self._run(pending, outputs, len(items), advance)
            finally:  # after an interrupt or an error, cancel the rest in the threads and in the engine
                pending.cancel()
                self.engine.cancel(name for name, output in outputs.items() if not output.done)
        return [
            RequestOutput(name, output.prompt, output.choices, output.usage, output.zoomed)
            for name, output in ((name, outputs[name]) for name in ids)
        ]

    def _run(
        self,
        pending: "_PendingRequests",
        outputs: dict[str, OutputProcessor],
        total: int,
        advance: Callable[[int], None],
    ) -> None:
        """Submit prepared requests and step until all are done; fills `outputs`."""
        finished = 0
        first = prepared = min(FIRST_STEP_REQUESTS, total)
        pending.prepare_up_to(prepared)
        while finished < total:
            while len(outputs) - finished < pending.window:
                request = pending.take(wait=len(outputs) < first or self.engine.idle)
                if request is None:
                    break
                outputs[request.id] = self.processor.output_processor(request, pending.params[request.id])
                self.engine.submit(request)
            prepared = min(2 * prepared, total)
            pending.prepare_up_to(prepared)
            newly_finished = 0
            for delta in self.engine.step():
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                output = outputs.get(delta.request_id)
                if output is not None and output.accumulate(delta):
                    newly_finished += 1
                    if output.must_cancel:
                        self.engine.cancel([delta.request_id])
            finished += newly_finished
            advance(newly_finished)


class _InlineExecutor(Executor):
    """Runs calls at once: a single request gains nothing from threads."""

    def submit(self, call: Callable[..., Item], /, *args: Any, **options: Any) -> Future[Item]:
        future: Future[Item] = Future()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def _worker_threads() -> Iterator[Executor]:
    previous = sys.getswitchinterval()
    shorten = previous > SWITCH_SECONDS  # otherwise another call has shortened it, and restores it
    if shorten:
        sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as executor:
            yield executor
    finally:
        if shorten:
            sys.setswitchinterval(previous)


class _PendingRequests:
    """Requests being prepared in threads, at most `window` ahead of the engine: images are large."""

    def __init__(
        self,
        executor: Executor,
        prepare: Callable[[Any, SamplingParams, str], Request],
        jobs: Sequence[tuple[Any, SamplingParams, str]],
        window: int,
    ) -> None:
        self.window = window
        self.params = {request_id: params for _, params, request_id in jobs}
        self._executor = executor
        self._prepare = prepare
        self._jobs = iter(jobs)
        self._num_started = 0
        self._futures: deque[Future[Request]] = deque()

    def prepare_up_to(self, count: int) -> None:
        """Start preparing, until `count` requests have been started in total or the window is full."""
        missing = min(count - self._num_started, self.window - len(self._futures))
        for job in itertools.islice(self._jobs, max(0, missing)):
            self._futures.append(self._executor.submit(self._prepare, *job))
            self._num_started += 1

    def take(self, *, wait: bool) -> Request | None:
        """The next request in order; None if none is started or, without `wait`, it is not ready."""
        if not self._futures or not (wait or self._futures[0].done()):
            return None
        return self._futures.popleft().result()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


@contextmanager
def _progress_bar(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of newly finished requests."""
    if not show:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("answering", total=total))


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _shared_images(prompts: Sequence[Prompt]) -> dict[int, SharedImage]:
    """Image objects (not paths or bytes) used by several prompts, by `id`."""
    images = [
        image
        for prompt in prompts
        if isinstance(prompt, Mapping) and isinstance(prompt.get("images"), list | tuple)
        for image in prompt["images"]
        if isinstance(image, Image.Image | np.ndarray)
    ]
    counts = Counter(map(id, images))
    return {id(image): SharedImage(image) for image in images if counts[id(image)] > 1}


def _prompt_parts(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    unknown = set(prompt) - PROMPT_KEYS
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        message = (
            "a prompt has either `prompt` or `prompt_token_ids`, and may have `images`, `videos` and `lod`"
        )
        if unknown:
            message += f"; {', '.join(sorted(map(str, unknown)))} is not known"
        raise InvalidValue(message, param="prompt")
    return prompt


def _one_for_each(
    given: Item | Sequence[Item] | None, count: int, default: Item, kind: str
) -> Sequence[Item]:
    if given is None:
        return [default] * count
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise InvalidValue(f"{len(given)} {kind} were given for {count} prompts", param="params")
    return given
