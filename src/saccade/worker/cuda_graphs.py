"""The CUDA graphs of steps: which shapes are captured, and when. A step whose capture fails runs eagerly."""

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
    MAX_GRAPHS,
    MIN_USES,
    SplitBatch,
    StepShape,
    choose_shape,
    distinct_kernels,
    first_shapes,
    later_shapes,
    split_batch,
)
from saccade.worker.graph_step import GraphStep

RETRY_AFTER = 2000  # steps until a failed capture is tried again
MAX_FAILURES = 3


def progress_bar(show: bool) -> Progress:
    """On a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))


class StepGraphCache:
    def __init__(
        self,
        step: GraphStep,
        recorder: Recorder,
        sampler: Sampler,
        max_seqs: int,
        max_model_len: int,
        min_uses: int = MIN_USES,
    ) -> None:
        self.step, self._sampler = step, sampler
        self._max_seqs, self._max_model_len = max_seqs, max_model_len
        self._graphs: CudaGraphCache[StepShape, Replay] = CudaGraphCache(
            "a step of",
            recorder,
            MAX_GRAPHS,
            min_uses=min_uses,
            evicts=False,
            max_failures=MAX_FAILURES,
            retry_after=RETRY_AFTER,
        )
        visual, early_exit = step.takes_visual, step.keeps_hidden_states
        self._later = deque(later_shapes(max_seqs, max_model_len, visual=visual, early_exit=early_exit))

    def __len__(self) -> int:
        return len(self._graphs)

    def find(
        self, scheduled: tuple[ScheduledSequence, ...], *, early_exit: bool = False
    ) -> tuple[SplitBatch, StepShape, Replay] | None:
        """The graph that can run this batch, captured now if that is due; None: the step runs eagerly."""
        split = split_batch(scheduled)
        if split is None or not self.step.supports(split):
            return None
        ending = "early_exit" if early_exit else self._sampler.graph_ending((*split.decodes, *split.prefills))
        shape = choose_shape(split, ending, self._max_seqs, self._max_model_len)
        if shape is None:
            return None
        replay = self._graphs.get(shape)
        # Decode-only steps are captured at their first use.
        if replay is None and self._graphs.is_due(shape, now=not shape.prefills):
            replay = self._capture(shape)
        return None if replay is None else (split, shape, replay)

    def warm_up(self, progress: bool) -> None:
        """Compile the kernels of all shapes, and capture the most frequent ones."""
        shapes = first_shapes(self._max_seqs, self._max_model_len)
        self._compile([*shapes, *distinct_kernels(list(self._later))])
        with progress_bar(progress) as bar:
            for shape in bar.track(shapes, description="decode steps"):
                self._capture(shape)

    def _compile(self, shapes: Sequence[StepShape]) -> None:
        with compile_only():
            for shape in shapes:
                self.step.fill_with_padding(shape)
                self.step.run(shape, compile_only=True)

    @property
    def pending(self) -> int:
        """Shapes that `capture_next` has not tried."""
        return len(self._later)

    def capture_next(self) -> bool:
        """While idle: capture one more shape; returns whether there was one."""
        while self._later:
            shape = self._later.popleft()
            if shape not in self._graphs and not self._graphs.has_failed(shape) and self._graphs.has_room():
                self._capture(shape)
                return True
        return False

    def _capture(self, shape: StepShape) -> Replay | None:
        try:
            self.step.fill_with_padding(shape)
            run = partial(self.step.run, shape)
            run()  # compiles kernels and allocates library handles, which must not happen during the capture
            replay = self._graphs.record(run)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._graphs.fail(shape, error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            return None
        self._graphs.put(shape, replay)
        return replay
