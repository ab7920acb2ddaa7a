"""Executor: runs step plans on the model.

Everything a rank needs is in the plan, swaps and block copies included, so that several ranks given the same
plans hold the same state. Today there is one rank, in the engine core's process.
"""

from typing import Protocol

import torch

from saccade.lod.types import RelevanceMaps
from saccade.step_plan import StepOutput, StepPlan
from saccade.worker.model_runner import ModelRunner
from saccade.worker.warmup import IdleWarmup


class StepFuture(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    @property
    def is_graph(self) -> bool:
        """Whether it is the replay of a CUDA graph."""

    @property
    def done(self) -> bool:
        """Whether the device is known to be done, so that `wait` returns at once."""

    def wait(self) -> StepOutput: ...

    @property
    def has_relevance(self) -> bool: ...

    def wait_relevance(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        """The relevance maps alone, which arrive before the rest of the output."""


class Executor(Protocol):
    def encode(self, plan: StepPlan) -> dict[bytes, str]:
        """Run the plan's swaps and encodes. Returns the reason of failure by view key; the caller then
        executes the plan without the sequences that need those views."""

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch the rest of the plan."""

    def prefetch(self, plan: StepPlan) -> None:
        """Upload the images that an early-exit step scores: zoomed views may be cut from them next."""

    def check_device(self) -> None:
        """Raise if the device's context is lost: then no request can be served any more."""

    def warm_up(self) -> bool:
        """While idle, compile or capture one more step; returns whether there was one."""

    @property
    def pending_warmups(self) -> int: ...

    @property
    def graph_replays(self) -> int: ...


class SingleProcessExecutor:
    """One rank, in this process."""

    def __init__(self, runner: ModelRunner, warmup: IdleWarmup) -> None:
        self.runner, self.warmup = runner, warmup

    def encode(self, plan: StepPlan) -> dict[bytes, str]:
        return self.runner.encode(plan)

    def execute(self, plan: StepPlan) -> StepFuture:
        return self.runner.execute(plan)

    def prefetch(self, plan: StepPlan) -> None:
        self.runner.prefetch_images(plan)

    def check_device(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def warm_up(self) -> bool:
        return self.warmup.run_next()

    @property
    def pending_warmups(self) -> int:
        return self.warmup.pending

    @property
    def graph_replays(self) -> int:
        return self.runner.graph_replays
