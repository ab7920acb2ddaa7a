"""The library: an engine in this process, asked in batches.

    llm = LLM("embedded")
    answers = llm.generate([{"prompt": ..., "images": [picture]}], SamplingParams(max_tokens=64))

takes   prompts or conversations in any form `InputProcessor` understands
gives   one `Output` per prompt, in order
owns    an engine, and the front that prepares its requests
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
from saccade.lod.detail import Wishes
from saccade.lod.types import LodParams
from saccade.request import Delta, Request, ZoomResult
from saccade.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "images", "videos", "lod"))
One = TypeVar("One")
# Threads that decode pictures and tokenise ahead of the engine, mostly outside of the interpreter: on two
# cores four were quicker than two.
PREPARERS = min(8, max(4, (os.cpu_count() or 1) // 2))
# Seconds after which one of them lets the engine's thread go on, which gives the interpreter away with every
# kernel it launches. Of 128 questions about pictures on two cores, with Python's own 5 ms all launches took
# 213 ms at best and 275 in the median; with this, 164 and 244.
SWITCH_SECONDS = 2e-4
# Requests the first step waits for, if there are as many. They alone are prepared until it begins; then twice
# as many with every step. Preparing all at once kept the engine from beginning for 50 ms more.
FIRST = 32


@dataclass(frozen=True)
class Output:
    """The answer to one prompt: `outputs[i]` has token_ids, text, finish_reason and logprobs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # one placeholder per picture
    outputs: list[CompletionOutput]
    usage: Usage
    zoomed: ZoomResult | None = None  # the views chosen, where level of detail was asked for


class LLM:
    """A model, loaded and ready. Options are those of `EngineConfig`; `itl_target` is off unless given."""

    def __init__(
        self, model: str, *, media: MediaLimits | None = None, progress: bool = True, **options: Any
    ) -> None:
        self._progress = progress
        if options.get("itl_target") is None:
            options["itl_target"] = 0.0  # nobody reads along: the largest steps are the fastest
        self.engine = Engine(EngineConfig(model=model, **options), progress=progress)
        limits = media or MediaLimits()
        self.front = InputProcessor(open_checkpoint(model), self.engine.info.max_model_len, limits)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lod: LodParams | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer prompts: strings, token ids, or dicts.

        A dict has `prompt` or `prompt_token_ids`, and may have `images`, `videos` and `lod` (LodParams; else
        those of the call; without any, pictures are seen in full). Prompts are prepared while earlier ones
        are computed; one that is refused ends the call, and nothing of it goes on running.
        """
        many = _as_prompts(prompts)
        shared = _shared_pictures(many)

        def prepare(prompt: Prompt, one: SamplingParams, name: str) -> Request:
            parts = _as_parts(prompt)
            text = parts["prompt"] if "prompt" in parts else parts["prompt_token_ids"]
            return self.front.prepare_prompt(
                text,
                one,
                name,
                images=_images(parts, shared),
                videos=parts.get("videos", ()),
                trusted=True,
                wishes=Wishes(params=parts.get("lod", lod)),
            )

        return self._answer(many, params, prepare, progress)

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lod: LodParams | Sequence[LodParams | None] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer one conversation (a list of OpenAI messages) or several (a list of such lists).

        `lod` is for all of them, or one for each; without any, pictures are seen as their parts say.
        """
        if not messages:
            raise InvalidValue("messages is empty; give at least one message", param="messages")
        many = [messages] if isinstance(messages[0], Mapping) else messages
        wishes = _one_for_each(lod, len(many), None, "levels of detail")

        def prepare(job: tuple[Any, LodParams | None], one: SamplingParams, name: str) -> Request:
            conversation, asked = job
            return self.front.prepare_chat(conversation, one, name, trusted=True, wishes=Wishes(params=asked))

        return self._answer(list(zip(many, wishes, strict=True)), params, prepare, progress)

    def close(self) -> None:
        self.front.close()
        self.engine.close()

    def _answer(
        self,
        asked: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[Any, SamplingParams, str], Request],
        progress: bool | None,
    ) -> list[Output]:
        each = _one_for_each(params, len(asked), SamplingParams(), "sampling parameters")
        names = [f"request-{next(self._numbers)}" for _ in asked]
        show = self._progress if progress is None else progress
        with (
            _Now() if len(asked) == 1 else _preparers() as pool,
            _bar(len(asked), show=show and len(asked) > 1) as advance,
            existing_objects_frozen(),
        ):
            window = 2 * self.engine.info.max_num_seqs
            ahead = _Ahead(pool, prepare, list(zip(asked, each, names, strict=True)), window)
            answers: dict[str, OutputProcessor] = {}
            prompts: dict[str, tuple[int, ...]] = {}
            try:
                for request in self._run(ahead, answers, len(asked), advance):
                    answers[request.id] = self.front.output_processor(request, ahead.params[request.id])
                    prompts[request.id] = request.prompt
            finally:  # an interrupt or a refusal leaves nothing behind, in the engine or in the threads
                ahead.stop()
                self.engine.cancel(name for name, answer in answers.items() if not answer.done)
        return [
            Output(name, prompts[name], one.choices, one.usage, one.zoomed)
            for name, one in ((name, answers[name]) for name in names)
        ]

    def _run(
        self, ahead: "_Ahead", answers: dict[str, OutputProcessor], total: int, advance: Callable[[int], None]
    ) -> Iterator[Request]:
        """Step until all are answered, submitting what is prepared; yields each request as it goes in."""
        done = 0
        waited_for = most = min(FIRST, total)
        ahead.reach(most)
        while done < total:
            while len(answers) - done < ahead.window:
                wait = len(answers) < waited_for or self.engine.idle
                request = ahead.take(wait=wait)
                if request is None:
                    break
                yield request  # its answer is there before its first delta
                self.engine.submit(request)
            most = min(2 * most, total)
            ahead.reach(most)
            whole = 0
            for delta in self.engine.step():
                if delta.error:
                    raise engine_error(delta.code, delta.error)
                if delta.request_id in answers:
                    whole += self._push(answers[delta.request_id], delta)
            done += whole
            advance(whole)

    def _push(self, answer: OutputProcessor, delta: Delta) -> bool:
        """Fold a delta in; whether it made the answer whole."""
        whole = answer.accumulate(delta)
        if whole and answer.must_cancel:
            self.engine.cancel([delta.request_id])
        return whole


class _Now(Executor):
    """Does what it is given at once: a single request gains nothing from threads, and they cost a moment."""

    def submit(self, call: Callable[..., One], /, *args: Any, **options: Any) -> Future[One]:
        future: Future[One] = Future()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def _preparers() -> Iterator[Executor]:
    """Threads beside the engine's, for as long as they are needed."""
    usual = sys.getswitchinterval()
    longer = usual > SWITCH_SECONDS  # else somebody else has shortened it, and sets it back
    if longer:
        sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with ThreadPoolExecutor(PREPARERS) as pool:
            yield pool
    finally:
        if longer:
            sys.setswitchinterval(usual)


class _Ahead:
    """Requests being prepared in threads, a bounded number ahead of the engine: pictures are large."""

    def __init__(
        self,
        pool: Executor,
        prepare: Callable[[Any, SamplingParams, str], Request],
        jobs: Sequence[tuple[Any, SamplingParams, str]],
        window: int,
    ) -> None:
        self.window = window
        self.params = {name: params for _, params, name in jobs}
        self._pool = pool
        self._prepare = prepare
        self._jobs = iter(jobs)
        self._begun = 0
        self._coming: deque[Future[Request]] = deque()

    def reach(self, count: int) -> None:
        """Have that many prepared, counted from the first, as far as the window lets it."""
        missing = min(count - self._begun, self.window - len(self._coming))
        for job in itertools.islice(self._jobs, max(0, missing)):
            self._coming.append(self._pool.submit(self._prepare, *job))
            self._begun += 1

    def take(self, *, wait: bool) -> Request | None:
        """The next request in order; None when none is begun or, unless told to wait, none ready."""
        if not self._coming or not (wait or self._coming[0].done()):
            return None
        return self._coming.popleft().result()

    def stop(self) -> None:
        for future in self._coming:
            future.cancel()


@contextmanager
def _bar(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """To be called with how many more are done."""
    if not show:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("answering", total=total))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _shared_pictures(prompts: Sequence[Prompt]) -> dict[int, SharedImage]:
    """Pictures (objects, not names or bytes) that stand in several of the prompts, by their identity."""
    given = [
        image
        for prompt in prompts
        if isinstance(prompt, Mapping) and isinstance(prompt.get("images"), list | tuple)
        for image in prompt["images"]
        if isinstance(image, Image.Image | np.ndarray)
    ]
    counts = Counter(map(id, given))
    return {id(image): SharedImage(image) for image in given if counts[id(image)] > 1}


def _images(parts: Mapping[str, Any], shared: Mapping[int, SharedImage]) -> Any:
    given = parts.get("images", ())
    return [shared.get(id(one), one) for one in given] if isinstance(given, list | tuple) else given


def _as_parts(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    unknown = set(prompt) - PROMPT_KEYS
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        told = f"; {', '.join(sorted(map(str, unknown)))} is not known" if unknown else ""
        raise InvalidValue(
            f"a prompt has either `prompt` or `prompt_token_ids`, and may have `images`, `videos` and "
            f"`lod`{told}",
            param="prompt",
        )
    return prompt


def _one_for_each(given: One | Sequence[One] | None, count: int, default: One, what: str) -> Sequence[One]:
    if given is None:
        return [default] * count
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise InvalidValue(f"{len(given)} {what} were given for {count} prompts", param="params")
    return given
