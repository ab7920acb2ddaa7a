"""Captured steps: which shapes are recorded, replayed, given up.

takes   a plan's rows, the step over static buffers (`FixedStep`)
gives   the captured step that can run them, recorded when first needed
owns    the graphs and the memory pool they share
never   lets a capture that fails end a request: the step then takes the ordinary way, and the shape is tried
        again much later

A recorder turns the call of a function into something that can be repeated: `CudaRecorder` a CUDA graph,
`PlainRecorder` the call itself, so that padding, write-back and bookkeeping are the same on the CPU.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.plan import Row
from saccade.runtime.buckets import MOST, SIGHTINGS, Division, Shape, divide, shape_of, small_shapes
from saccade.runtime.fixed import FixedStep
from saccade.runtime.sampler import Sampler

log = logging.getLogger(__name__)

Replay = Callable[[], None]
RETRY_AFTER = 2000  # steps until a shape whose capture failed is tried again
MOST_TRIES = 3


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Replay:
        """Call it once or twice now, and give what repeats it; raises where that is not possible."""
        ...


class PlainRecorder:
    def record(self, function: Callable[[], None]) -> Replay:
        function()
        return function


class CudaRecorder:
    """CUDA graphs in one memory pool: they never run at the same time, so they may share every byte."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Replay:
        function()  # compiles kernels, makes library handles: none of that may happen while capturing
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads may go on with what they do to the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed; what is wrong with it has been said already."""
    for end in (graph.capture_end, graph.reset):
        try:
            end()
        except RuntimeError as error:
            log.debug("ending a failed capture: %s", error)


class Graphs:
    def __init__(
        self,
        step: FixedStep,
        recorder: Recorder,
        sampler: Sampler,
        most_rows: int,
        longest: int,
        sightings: int = SIGHTINGS,  # of a shape with prompts before it is captured
    ) -> None:
        self._step, self._recorder, self._sampler = step, recorder, sampler
        self._most_rows, self._longest = most_rows, longest
        self._replays: dict[Shape, Replay] = {}
        self._sightings = sightings
        self._seen: dict[Shape, int] = {}
        self._failed: dict[Shape, tuple[int, int]] = {}  # tries, the step of the last
        self._steps = 0

    def __len__(self) -> int:
        return len(self._replays)

    def find(self, rows: tuple[Row, ...]) -> tuple[Division, Shape, Replay] | None:
        """The captured step for these rows; None: they take the ordinary way."""
        self._steps += 1
        divided = divide(rows)
        if divided is None:
            return None
        ending = self._sampler.ending((*divided.decodes, *divided.chunks))
        shape = shape_of(divided, ending, self._most_rows, self._longest)
        if shape is None:
            return None
        replay = self._replays.get(shape) or self._capture_if_worth(shape)
        return None if replay is None else (divided, shape, replay)

    def warm(self, progress: bool) -> None:
        """Capture the small decode steps, the largest first."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = progress and console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
            for shape in bar.track(small_shapes(self._most_rows, self._longest), description="decode steps"):
                self._capture(shape)

    def _capture_if_worth(self, shape: Shape) -> Replay | None:
        tries, last = self._failed.get(shape, (0, 0))
        if len(self._replays) >= MOST or tries >= MOST_TRIES or (tries and self._steps - last < RETRY_AFTER):
            return None
        if shape.chunks:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] < self._sightings:
                return None
        return self._capture(shape)

    def _capture(self, shape: Shape) -> Replay | None:
        try:
            self._step.clear(shape)
            replay = self._recorder.record(lambda: self._step.run(shape))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            tries = self._failed.get(shape, (0, 0))[0] + 1
            self._failed[shape] = tries, self._steps
            if tries == 1:
                log.warning(
                    "a step of %d rows and %d prompt tokens cannot be captured (%s); it runs without, slower",
                    shape.decodes,
                    shape.tokens,
                    str(error).split("\n")[0],
                )
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            return None
        self._failed.pop(shape, None)
        self._replays[shape] = replay
        return replay
