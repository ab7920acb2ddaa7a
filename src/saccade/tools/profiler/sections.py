"""The three things that are profiled: a new picture, a prompt, decode steps; each can be run again and again.

takes   an engine in this process
gives   sections: what to prepare, what to run, and the least it could take (saccade/tools/bench/ceilings.py)
never   lets anything be found in a cache: every prompt and picture is new; counts a decode step in which
        anything else happens, a prompt or an end
"""

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
from saccade.step_plan import StepResult
from saccade.tools.bench.ceilings import Floors
from saccade.tools.bench.inputs import Inputs
from saccade.tools.bench.workloads import greedy
from saccade.tools.profiler.options import ProfileOptions
from saccade.tools.profiler.trace import STEP
from saccade.worker.model_runner import Launched

TEXT_TOKENS = 64  # beside the picture
PREPROCESS, ENCODE = "saccade.preprocess", "saccade.encode"  # ranges inside the picture's section
# Tokens a sequence can say while others' prompts are computed: so many, and one for every so many of theirs.
SPARE, PIECE = 64, 256


@dataclass(frozen=True)
class Ran:
    """What was done, and the least it could have taken."""

    times: int  # to divide by
    what: str  # in words
    floor: float  # ms of one
    parts: dict[str, float] = field(default_factory=dict)  # ms at least of kinds of kernels and ranges


@dataclass(frozen=True)
class Section:
    name: str
    prepare: Callable[[], None]  # not timed
    run: Callable[[], Ran]
    steady: bool = False  # goes on in a loop that runs: the device is not waited for before


class Workbench:
    def __init__(self, llm: LLM, options: ProfileOptions, floors: Floors) -> None:
        self._llm = llm
        self._options = options
        self._floors = floors
        self._inputs = Inputs(llm.processor.checkpoint, llm.processor.tokenizer, 0)
        self._names = (f"profile-{number}" for number in count())
        self._running: list[str] = []
        self._next: list[Request] = []

    def sections(self) -> list[Section]:
        checkpoint = self._llm.processor.checkpoint
        sees = checkpoint.image is not None and checkpoint.image_token_id is not None
        return [*([self._picture()] if sees else []), self._prompt(), self._decode()]

    def _ask(self, prompt: list[int], tokens: int, **media: Any) -> Request:
        name = next(self._names)
        return self._llm.processor.prepare_prompt(prompt, greedy(tokens), name, trusted=True, **media)

    def _clear(self) -> None:
        """Nothing runs: what was left decoding would be part of what is timed next."""
        engine = self._llm.engine
        engine.cancel(self._running)
        while not engine.idle:
            engine.step()

    def _answer(self) -> None:
        """From the request to its only token, as the engine does it."""
        engine = self._llm.engine
        for request in self._next:
            engine.submit(request)
        while not engine.idle:
            engine.step()

    def _picture(self) -> Section:
        size = self._options.image_size
        processing = self._llm.processor.checkpoint.image
        if processing is None:
            raise ConfigError("this model takes no pictures")
        rows, columns = processing.grid(*size)
        patches = rows * columns
        tokens = patches // processing.merge_size**2 + TEXT_TOKENS + 2
        self._require(tokens + 1, 1)

        def prepare() -> None:
            self._clear()
            inputs = self._inputs
            self._next = [self._ask(inputs.about_image(TEXT_TOKENS), 1, images=[inputs.image(size)])]

        floors, patch = self._floors, 3 * processing.temporal_patch_size * processing.patch_size**2
        moved = 3 * size[0] * size[1] + patches * patch * floors.network.value_bytes
        parts = {
            PREPROCESS: 1e3 * moved / floors.chip.bandwidth,
            ENCODE: floors.encode(patches),
        }
        what = f"{size[0]} x {size[1]}, {patches} patches, {tokens} tokens, to the first token"
        done = Ran(1, what, floors.encode(patches) + floors.prefill(tokens), parts)

        def run() -> Ran:
            self._answer()
            return done

        return Section("picture", prepare, run)

    def _prompt(self) -> Section:
        tokens = self._options.context
        self._require(tokens + 1, 1)

        def prepare() -> None:
            self._clear()
            self._next = [self._ask(self._inputs.text(tokens), 1)]

        done = Ran(1, f"{tokens} tokens, to the first token", self._floors.prefill(tokens))

        def run() -> Ran:
            self._answer()
            return done

        return Section("prefill", prepare, run)

    def _decode(self) -> Section:
        options, info = self._options, self._llm.engine.info
        steps, rows = options.steps, options.batch
        self._require(options.context + steps + 2, rows)
        room = min(info.max_model_len, info.num_blocks * info.block_size) - options.context
        most = min(room, steps + 2 + SPARE + rows * options.context // PIECE)
        told: dict[str, int] = {}  # tokens of each sequence so far

        def prepare() -> None:
            """Every sequence has its first token, and the step in flight, if any, is one of all of them."""
            self._clear()
            asked = [self._ask(self._inputs.text(options.context), most) for _ in range(rows)]
            self._running = [request.id for request in asked]
            told.clear()
            told.update(dict.fromkeys(self._running, 0))
            for request in asked:
                self._llm.engine.submit(request)
            while not self._all_decode(told):
                pass
            if max(told.values()) + steps + 1 > most:  # 1: the step in flight afterwards
                raise ConfigError(_apart(rows))

        def run() -> Ran:
            before = sum(told.values())
            for _ in range(steps):
                with record_function(STEP):
                    whole = self._all_decode(told)
                if not whole:
                    raise ConfigError(_apart(rows))
            return self._steps_of(rows, options.context + before / rows + (steps - 1) / 2)

        return Section("decode", prepare, run, steady=True)

    def _all_decode(self, told: dict[str, int]) -> bool:
        """One step; whether the one just learnt gave every sequence a token. Then the next, which may be in
        flight, does that and nothing else: no prompt waits, and no answer ends yet."""
        deltas = [delta for delta in self._llm.engine.step() if delta.request_id in told]
        if any(delta.finish is not None for delta in deltas):
            raise ConfigError(_apart(len(told)))
        for delta in deltas:
            told[delta.request_id] += len(delta.tokens)
        return sum(1 for delta in deltas if delta.tokens) == len(told)

    def _steps_of(self, rows: int, context: float) -> Ran:
        """Decode steps of so many sequences, each of so many tokens on average."""
        floors, tokens = self._floors, round(context)
        parts = {"products": floors.products(rows), "attention": floors.reading(rows * tokens)}
        what = f"{rows} sequences of {tokens} tokens on average, one step"
        return Ran(self._options.steps, what, floors.decode(rows, tokens), parts)

    def _require(self, tokens: int, rows: int) -> None:
        info = self._llm.engine.info
        blocks = rows * -(-tokens // info.block_size)
        if tokens > info.max_model_len or rows > info.max_num_seqs or blocks > info.num_blocks:
            raise ConfigError(
                f"{rows} sequences of {tokens} tokens do not fit: the engine takes {info.max_num_seqs} of"
                f" {info.max_model_len} and {info.num_blocks} blocks together; lower --batch, --context or"
                " --image-size"
            )


def _apart(rows: int) -> str:
    return (
        f"{rows} sequences did not decode all in one step, step after step: some ended or gave way before the"
        " last had begun; lower --batch or --context, or give the engine more blocks"
    )


class Clock:
    """Seconds the host waited for results, of the time it was looked at."""

    waited = 0.0


@contextmanager
def watched() -> Iterator[Clock]:
    """While inside: waiting for results is timed, and preprocessing and encoding are ranges of the trace."""
    clock = Clock()
    wait, patches, encode = Launched.wait, Preprocessor.patches, EncoderRunner.try_encode

    @wraps(wait)
    def timed(self: Launched) -> StepResult:
        began = time.perf_counter()
        try:
            return wait(self)
        finally:
            clock.waited += time.perf_counter() - began

    def named(name: str, method: Any) -> Any:
        @wraps(method)
        def call(*arguments: Any, **given: Any) -> Any:
            with record_function(name):
                return method(*arguments, **given)

        return call

    try:
        Launched.wait = timed  # type: ignore[method-assign]
        Preprocessor.patches = named(PREPROCESS, patches)  # type: ignore[method-assign]
        EncoderRunner.try_encode = named(ENCODE, encode)  # type: ignore[method-assign]
        yield clock
    finally:
        Launched.wait = wait  # type: ignore[method-assign]
        Preprocessor.patches = patches  # type: ignore[method-assign]
        EncoderRunner.try_encode = encode  # type: ignore[method-assign]
