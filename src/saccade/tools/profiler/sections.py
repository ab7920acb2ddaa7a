"""The sections that are profiled: a new image, a prompt, decode steps. Each can run repeatedly.

Every prompt and image is new, so no cache helps; a decode step that does anything else (prefill, an ending
sequence) is an error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any

from torch.profiler import record_function

from saccade.encoder.encoder_runner import EncoderRunner
from saccade.encoder.preprocess import Preprocessor
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.request import Request
from saccade.step_plan import StepOutput
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.workloads import greedy
from saccade.tools.options import ProfileOptions
from saccade.tools.profiler.floors import Floors
from saccade.tools.profiler.trace import STEP
from saccade.worker.model_runner import LaunchedStep

TEXT_TOKENS = 64  # beside the image
PREPROCESS, ENCODE = "saccade.preprocess", "saccade.encode"  # ranges inside the image's section
# Tokens that a sequence may decode during the prefill of others: SPARE, and one per CHUNK of their prompt
# tokens.
SPARE, CHUNK = 64, 256


@dataclass(frozen=True)
class SectionRun:
    """What a section did, and the lower bound of its time."""

    times: int  # repetitions to divide by
    what: str  # in words
    floor: float  # ms per repetition
    parts: dict[str, float] = field(default_factory=dict)  # floors of kinds of kernels and ranges, ms


@dataclass(frozen=True)
class Section:
    name: str
    prepare: Callable[[], None]  # not timed
    run: Callable[[], SectionRun]
    steady: bool = False  # continues a running loop: no synchronisation before


class SectionFactory:
    def __init__(self, llm: LLM, options: ProfileOptions, floors: Floors) -> None:
        self._llm = llm
        self._options = options
        self._floors = floors
        self._inputs = RandomInputs(llm.processor.checkpoint, llm.processor.tokenizer, 0)
        self._names = (f"profile-{number}" for number in count())
        self._running: list[str] = []

    def sections(self) -> list[Section]:
        checkpoint = self._llm.processor.checkpoint
        vision = checkpoint.image is not None and checkpoint.image_token_id is not None
        return [*([self._image()] if vision else []), self._prompt(), self._decode()]

    def _request(self, prompt: list[int], tokens: int, **media: Any) -> Request:
        name = next(self._names)
        return self._llm.processor.prepare_prompt(prompt, greedy(tokens), name, trusted=True, **media)

    def _clear(self) -> None:
        """Cancels sequences of the section before, so that they are not timed."""
        engine = self._llm.engine
        engine.cancel(self._running)
        while not engine.idle:
            engine.step()

    def _first_token(
        self, name: str, tokens: int, make: Callable[[], Request], result: SectionRun
    ) -> Section:
        """One request of so many tokens, from its submission to its only token."""
        self._require(tokens + 1, 1)
        engine, prepared = self._llm.engine, list[Request]()

        def prepare() -> None:
            self._clear()
            prepared.append(make())

        def run() -> SectionRun:
            engine.submit(prepared.pop())
            while not engine.idle:
                engine.step()
            return result

        return Section(name, prepare, run)

    def _image(self) -> Section:
        size, inputs = self._options.image_size, self._inputs
        processing = self._llm.processor.checkpoint.image
        if processing is None:
            raise ConfigError("this model takes no images")
        rows, columns = processing.grid(*size)
        patches = rows * columns
        tokens = patches // processing.merge_size**2 + TEXT_TOKENS + 2
        floors, patch = self._floors, 3 * processing.temporal_patch_size * processing.patch_size**2
        moved = 3 * size[0] * size[1] + patches * patch * floors.network.value_bytes
        parts = {PREPROCESS: 1e3 * moved / floors.chip.bandwidth, ENCODE: floors.encode(patches)}
        what = f"{size[0]} x {size[1]}, {patches} patches, {tokens} tokens, to the first token"
        result = SectionRun(1, what, floors.encode(patches) + floors.prefill(tokens), parts)

        def make() -> Request:
            return self._request(inputs.about_image(TEXT_TOKENS), 1, images=[inputs.image(size)])

        return self._first_token("image", tokens, make, result)

    def _prompt(self) -> Section:
        tokens = self._options.context
        result = SectionRun(1, f"{tokens} tokens, to the first token", self._floors.prefill(tokens))
        return self._first_token(
            "prefill", tokens, lambda: self._request(self._inputs.text(tokens), 1), result
        )

    def _decode(self) -> Section:
        options, info = self._options, self._llm.engine.info
        steps, rows = options.steps, options.batch
        self._require(options.context + steps + 2, rows)
        room = min(info.max_model_len, info.num_blocks * info.block_size) - options.context
        most = min(room, steps + 2 + SPARE + rows * options.context // CHUNK)
        decoded: dict[str, int] = {}  # tokens of each sequence so far

        def prepare() -> None:
            """Runs until every sequence has its first token and the step in flight decodes all of them."""
            self._clear()
            requests = [self._request(self._inputs.text(options.context), most) for _ in range(rows)]
            self._running = [request.id for request in requests]
            decoded.clear()
            decoded.update(dict.fromkeys(self._running, 0))
            for request in requests:
                self._llm.engine.submit(request)
            while not self._all_decode(decoded):
                pass
            if max(decoded.values()) + steps + 1 > most:  # 1: the step in flight
                raise ConfigError(_not_together(rows))

        def run() -> SectionRun:
            before = sum(decoded.values())
            for _ in range(steps):
                with record_function(STEP):
                    whole = self._all_decode(decoded)
                if not whole:
                    raise ConfigError(_not_together(rows))
            return self._decode_run(rows, options.context + before / rows + (steps - 1) / 2)

        return Section("decode", prepare, run, steady=True)

    def _all_decode(self, decoded: dict[str, int]) -> bool:
        """Runs one step; whether its output has a token of every sequence. Then the next step, which may be
        in flight, does the same: no prompt waits and no answer ends."""
        deltas = [delta for delta in self._llm.engine.step() if delta.request_id in decoded]
        if any(delta.finish is not None for delta in deltas):
            raise ConfigError(_not_together(len(decoded)))
        for delta in deltas:
            decoded[delta.request_id] += len(delta.tokens)
        return sum(1 for delta in deltas if delta.tokens) == len(decoded)

    def _decode_run(self, rows: int, context: float) -> SectionRun:
        """The result of decode steps; `context` is the mean length of a sequence."""
        floors, tokens = self._floors, round(context)
        parts = {"products": floors.products(rows), "attention": floors.reading(rows * tokens)}
        what = f"{rows} sequences of {tokens} tokens on average, one step"
        return SectionRun(self._options.steps, what, floors.decode(rows, tokens), parts)

    def _require(self, tokens: int, rows: int) -> None:
        info = self._llm.engine.info
        blocks = rows * -(-tokens // info.block_size)
        if tokens > info.max_model_len or rows > info.max_num_seqs or blocks > info.num_blocks:
            raise ConfigError(
                f"{rows} sequences of {tokens} tokens do not fit: the engine takes {info.max_num_seqs} of"
                f" {info.max_model_len} and {info.num_blocks} blocks together; lower --batch, --context or"
                " --image-size"
            )


def _not_together(rows: int) -> str:
    return (
        f"{rows} sequences did not decode all in one step, step after step: some ended or were preempted"
        " before the last had started; lower --batch or --context, or give the engine more blocks"
    )


class WaitClock:
    """Seconds that the host waited for results."""

    waited = 0.0


@contextmanager
def instrumented() -> Iterator[WaitClock]:
    """Times the waits for results, and makes preprocessing and encoding ranges of the trace."""
    clock = WaitClock()
    wait, patches, encode = LaunchedStep.wait, Preprocessor.patches, EncoderRunner.try_encode

    @wraps(wait)
    def timed(self: LaunchedStep) -> StepOutput:
        start = time.perf_counter()
        try:
            return wait(self)
        finally:
            clock.waited += time.perf_counter() - start

    def named(name: str, method: Any) -> Any:
        @wraps(method)
        def call(*arguments: Any, **given: Any) -> Any:
            with record_function(name):
                return method(*arguments, **given)

        return call

    try:
        LaunchedStep.wait = timed  # type: ignore[method-assign]
        Preprocessor.patches = named(PREPROCESS, patches)  # type: ignore[method-assign]
        EncoderRunner.try_encode = named(ENCODE, encode)  # type: ignore[method-assign]
        yield clock
    finally:
        LaunchedStep.wait = wait  # type: ignore[method-assign]
        Preprocessor.patches = patches  # type: ignore[method-assign]
        EncoderRunner.try_encode = encode  # type: ignore[method-assign]
