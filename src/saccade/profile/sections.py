"""The three things that are profiled: a new picture, a prompt, decode steps; each can be run again and again.

takes   an engine in this process
gives   sections: what to prepare, what to run, and the least it could take (saccade/bench/ceilings.py)
never   lets anything be found in a cache: every prompt and picture is new
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any

from torch.profiler import record_function

from saccade.bench.ceilings import Floors
from saccade.bench.inputs import Inputs
from saccade.bench.session import greedy
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.plan import StepResult
from saccade.profile.options import ProfileOptions
from saccade.request import Request
from saccade.runtime.runner import Launched
from saccade.vision.encode import Encoder
from saccade.vision.preprocess import Preprocessor

TEXT_TOKENS = 64  # beside the picture
PREPROCESS, ENCODE = "saccade.preprocess", "saccade.encode"  # ranges inside the picture's section


@dataclass(frozen=True)
class Section:
    name: str
    what: str  # in words
    prepare: Callable[[], None]  # not timed
    run: Callable[[], int]  # gives how often the thing was done, to divide by
    floor: float  # ms of one
    parts: dict[str, float] = field(default_factory=dict)  # ms at least of kinds of kernels and ranges


class Workbench:
    def __init__(self, llm: LLM, options: ProfileOptions, floors: Floors) -> None:
        self._llm = llm
        self._options = options
        self._floors = floors
        self._inputs = Inputs(llm.front.checkpoint, llm.front.tokens, 0)
        self._names = (f"profile-{number}" for number in count())
        self._running: list[str] = []
        self._next: list[Request] = []

    def sections(self) -> list[Section]:
        checkpoint = self._llm.front.checkpoint
        sees = checkpoint.image is not None and checkpoint.image_token_id is not None
        return [*([self._picture()] if sees else []), self._prompt(), self._decode()]

    def _ask(self, prompt: list[int], tokens: int, **media: Any) -> Request:
        name = next(self._names)
        return self._llm.front.prepare_prompt(prompt, greedy(tokens), name, trusted=True, **media)

    def _clear(self) -> None:
        """Nothing runs: what was left decoding would be part of what is timed next."""
        engine = self._llm.engine
        engine.cancel(self._running)
        while not engine.idle:
            engine.step()

    def _answer(self) -> int:
        """From the request to its only token, as the engine does it."""
        engine = self._llm.engine
        for request in self._next:
            engine.submit(request)
        while not engine.idle:
            engine.step()
        return 1

    def _picture(self) -> Section:
        size = self._options.image_size
        processing = self._llm.front.checkpoint.image
        if processing is None:
            raise ConfigError("this model takes no pictures")
        rows, columns = processing.grid(*size)
        patches = rows * columns
        tokens = patches // processing.merge_size**2 + TEXT_TOKENS + 2
        self._require(tokens + 1, 1)

        def prepare() -> None:
            self._clear()
            inputs = self._inputs
            self._next = [self._ask(inputs.about_picture(TEXT_TOKENS), 1, images=[inputs.picture(size)])]

        floors, patch = self._floors, 3 * processing.temporal_patch_size * processing.patch_size**2
        moved = 3 * size[0] * size[1] + patches * patch * floors.network.value_bytes
        parts = {
            PREPROCESS: 1e3 * moved / floors.chip.bandwidth,
            ENCODE: floors.encode(patches),
        }
        what = f"{size[0]} x {size[1]}, {patches} patches, {tokens} tokens, to the first token"
        least = floors.encode(patches) + floors.prefill(tokens)
        return Section("picture", what, prepare, self._answer, least, parts)

    def _prompt(self) -> Section:
        tokens = self._options.context
        self._require(tokens + 1, 1)

        def prepare() -> None:
            self._clear()
            self._next = [self._ask(self._inputs.text(tokens), 1)]

        return Section(
            "prefill",
            f"{tokens} tokens, to the first token",
            prepare,
            self._answer,
            self._floors.prefill(tokens),
        )

    def _decode(self) -> Section:
        options = self._options
        steps, rows = options.steps, options.batch
        self._require(options.context + steps + 8, rows)

        def prepare() -> None:
            """All rows are decoding when it is over."""
            self._clear()
            engine = self._llm.engine
            asked = [self._ask(self._inputs.text(options.context), steps + 8) for _ in range(rows)]
            self._running = [request.id for request in asked]
            for request in asked:
                engine.submit(request)
            begun: set[str] = set()
            while len(begun) < rows:
                begun |= {delta.request_id for delta in engine.step()}
            engine.step()

        def run() -> int:
            for _ in range(steps):
                self._llm.engine.step()
            return steps

        floors, middle = self._floors, options.context + steps // 2
        parts = {"products": floors.products(rows), "attention": floors.reading(rows * middle)}
        what = f"{rows} sequences of about {middle} tokens, one step"
        return Section("decode", what, prepare, run, floors.decode(rows, middle), parts)

    def _require(self, tokens: int, rows: int) -> None:
        info = self._llm.engine.info
        blocks = rows * -(-tokens // info.block_size)
        if tokens > info.max_model_len or rows > info.max_num_seqs or blocks > info.num_blocks:
            raise ConfigError(
                f"{rows} sequences of {tokens} tokens do not fit: the engine takes {info.max_num_seqs} of"
                f" {info.max_model_len} and {info.num_blocks} blocks together; lower --batch, --context or"
                " --image-size"
            )


class Clock:
    """Seconds the host waited for results, of the time it was looked at."""

    waited = 0.0


@contextmanager
def watched() -> Iterator[Clock]:
    """While inside: waiting for results is timed, and preprocessing and encoding are ranges of the trace."""
    clock = Clock()
    wait, patches, encode = Launched.wait, Preprocessor.patches, Encoder.attempt

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
        Encoder.attempt = named(ENCODE, encode)  # type: ignore[method-assign]
        yield clock
    finally:
        Launched.wait = wait  # type: ignore[method-assign]
        Preprocessor.patches = patches  # type: ignore[method-assign]
        Encoder.attempt = encode  # type: ignore[method-assign]
