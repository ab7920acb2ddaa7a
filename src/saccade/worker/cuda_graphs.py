"""Captured steps: which shapes are recorded, replayed, given up.

takes   a plan's rows, the step over static buffers (`FixedStep`)
gives   the captured step that can run them, recorded when first needed
owns    the graphs and the memory pool they share
never   lets a capture that fails end a request: the step then takes the ordinary way, and the shape is tried
        again much later
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.kernels.cuda_graph import CudaGraphCache, Recorder, Replay
from saccade.kernels.jit import compile_only
from saccade.sampling.sampler import Sampler
from saccade.step_plan import ScheduledSequence
from saccade.worker.buckets import (
    MOST,
    SIGHTINGS,
    Division,
    Shape,
    divide,
    first_shapes,
    later_shapes,
    shape_of,
    unlike,
)
from saccade.worker.graph_step import FixedStep

RETRY_AFTER = 2000  # steps until a shape whose capture failed is tried again
MOST_TRIES = 3


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
        self._step, self._sampler = step, sampler
        self._most_rows, self._longest = most_rows, longest
        self._graphs: CudaGraphCache[Shape, Replay] = CudaGraphCache(
            "a step of",
            recorder,
            MOST,
            min_uses=sightings,
            evicts=False,
            max_failures=MOST_TRIES,
            retry_after=RETRY_AFTER,
        )
        self._later = deque(later_shapes(most_rows, longest, vision=step.sees, looks=step.looks))

    def __len__(self) -> int:
        return len(self._graphs)

    def find(
        self, rows: tuple[ScheduledSequence, ...], *, brief: bool = False
    ) -> tuple[Division, Shape, Replay] | None:
        """The captured step for these rows; None: they take the ordinary way. `brief`: they only look."""
        divided = divide(rows)
        if divided is None or not self._step.holds(divided):
            return None
        ending = "look" if brief else self._sampler.ending((*divided.decodes, *divided.chunks))
        shape = shape_of(divided, ending, self._most_rows, self._longest)
        if shape is None:
            return None
        replay = self._graphs.get(shape) or self._capture_if_worth(shape)
        return None if replay is None else (divided, shape, replay)

    def warm(self, progress: bool) -> None:
        """Capture the steps that nearly everybody meets."""
        shapes = first_shapes(self._most_rows, self._longest)
        self._compile([*shapes, *unlike(list(self._later))])
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = progress and console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
            for shape in bar.track(shapes, description="decode steps"):
                self._capture(shape)

    def _compile(self, shapes: Sequence[Shape]) -> None:
        """What these launch, side by side; nothing of it runs."""
        with compile_only():
            for shape in shapes:
                self._step.clear(shape)
                self._step.run(shape)

    @property
    def to_come(self) -> int:
        """Shapes that `go_on` has not come to."""
        return len(self._later)

    def go_on(self) -> bool:
        """While nobody waits: capture one more of the steps that may come; gives whether there was one."""
        while self._later:
            shape = self._later.popleft()
            if shape not in self._graphs and not self._graphs.has_failed(shape) and self._graphs.has_room():
                self._capture(shape)
                return True
        return False

    def _capture_if_worth(self, shape: Shape) -> Replay | None:
        """Decode steps are captured at once, steps with prompts when their shape is frequent."""
        return self._capture(shape) if self._graphs.is_due(shape, now=not shape.chunks) else None

    def _capture(self, shape: Shape) -> Replay | None:
        try:
            self._step.clear(shape)
            run = partial(self._step.run, shape)
            run()  # compiles kernels and allocates library handles, which must not happen during the capture
            replay = self._graphs.record(run)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._graphs.fail(shape, error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            return None
        self._graphs.put(shape, replay)
        return replay
