"""The engine: constructs the rooms, wires them, and orders their work. It computes nothing itself.

takes   requests and cancellations
gives   deltas, one batch of them per step
owns    every room behind the link: scheduler, caches, model, device rows
never   goes on with a device that has failed; a step that cannot be computed ends the requests in it alone,
        a view that cannot be made those who need it
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.engine.builder import build_machine
from saccade.engine.cuda_timer import CudaMark
from saccade.engine.ipc import EngineInfo
from saccade.engine.pacing import Pace
from saccade.engine.step_log import StepLog
from saccade.engine.step_timer import DeviceStopwatch, Stopwatch, Watch
from saccade.metrics import EngineStats
from saccade.request import Delta, Request
from saccade.scheduler.cost_model import Coefficients
from saccade.scheduler.scheduler import Scheduler
from saccade.step_plan import StepPlan
from saccade.worker.model_runner import Launched, Runner

log = logging.getLogger(__name__)


class Loop(Protocol):
    def step(self) -> list[Delta]: ...

    @property
    def spare(self) -> float:
        """Seconds for which the next step need not be planned."""


class Turns:
    """What both loops do with a step: plan it, launch it, learn its result."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        watch: Watch,
        steps: StepLog | None = None,
        pace: Pace | None = None,  # None: the next step is always planned at once
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._watch = watch
        self._steps = steps
        self._pace = pace

    def spare(self, launched: Launched | None) -> float:
        """Seconds for which the step that follows a launched one need not be planned."""
        if self._pace is None or launched is None or launched.ended:
            return 0.0
        return self._pace.spare

    def rest(self) -> None:
        """Nobody has asked for anything for a while: that is no step's time."""
        self._watch.rest()
        self._scheduler.forget_untimed()

    @property
    def others_wait(self) -> bool:
        """Whether there are requests without a row."""
        return self._scheduler.short_of is not None

    def plan(self) -> StepPlan | None:
        if self._pace is not None:
            self._pace.begin()
        if self._steps is not None:
            self._steps.begin()
        plan = self._scheduler.plan()
        if self._steps is not None:
            self._steps.planned()
        return plan

    def launch(self, plan: StepPlan | None) -> tuple[Launched | None, list[Delta]]:
        """The running step, and apologies: to who needs a view that could not be made, or to all requests of
        a step that could not be launched."""
        if plan is None:
            self._scheduler.rest()
            return None, []
        self._watch.launch()
        told: list[Delta] = []
        try:
            failed = self._runner.begin(plan)
            if failed:
                _check_device()
                plan, told = self._scheduler.fail_views(plan, failed)
            launched = self._runner.launch(plan)
            self._watch.launched()
            self._runner.await_zooms(plan)
            if self._pace is not None:
                self._pace.launched(plan.expected_ms)
        except Exception:
            self._watch.reset()
            return None, told + _give_up(self._scheduler, plan)
        if self._steps is not None:
            self._steps.launched(plan, captured=launched.captured)
        self._scheduler.study()
        return launched, told

    def hear(self, launched: Launched) -> list[Delta]:
        """The looks of a step alone, which are there before its end: what follows them need not wait."""
        if launched.looks is None:
            return []
        try:
            looks = launched.looks.wait()
        except Exception:  # whoever learns the rest meets it too
            return []
        return self._scheduler.hear(launched.plan, looks)

    def learn(self, launched: Launched | None) -> list[Delta]:
        if launched is None:
            return []
        began = time.perf_counter()
        try:
            result = launched.wait()
        except Exception:
            self._watch.reset()
            if self._pace is not None:
                self._pace.result(None)
            return _give_up(self._scheduler, launched.plan)
        ended = bool(result.tokens or result.relevance)  # else its end was not seen
        seconds = self._watch.result(waited=ended)
        if self._pace is not None:
            self._pace.result(time.perf_counter() - began if ended else None)
        if self._steps is not None:
            self._steps.learnt(launched.plan, seconds)
        return self._scheduler.apply(launched.plan, result, seconds)


class SerialLoop:
    """Plan, run, learn; then the next. Nothing is in flight between steps."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def step(self) -> list[Delta]:
        launched, failed = self._turns.launch(self._turns.plan())
        return self._turns.learn(launched) + failed

    @property
    def spare(self) -> float:
        return 0.0


class OverlappedLoop:
    """The same, except that step N+1 is planned and launched before N is learnt.

    The token sampled in N is read by N+1 on the device. A stop found late costs one wasted row. Looks come
    before the rest of their step: where nothing can be done without them, the views chosen by them
    are in N+1. A step that does nothing but look has no rest: its views are on their way
    before anybody is told of anything.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ahead: Launched | None = None

    def step(self) -> list[Delta]:
        behind = self._ahead
        plan, heard = self._plan(behind)
        self._ahead, failed = self._turns.launch(plan)
        # Apologies go out at once: the engine may be idle from here on, and nobody steps an idle one.
        told = heard + self._turns.learn(behind) + failed
        if plan is None and not told and behind is not None and behind.looks is not None:
            self._ahead, told = self._turns.launch(self._turns.plan())
        return told

    def _plan(self, behind: Launched | None) -> tuple[StepPlan | None, list[Delta]]:
        """The next step, and what was heard for it."""
        plan = self._turns.plan()
        if plan is not None or behind is None or behind.looks is None or behind.plan.early_exit:
            return plan, []
        if self._turns.others_wait:  # perhaps for what the step computes, which they find once it is learnt
            return None, []
        heard = self._turns.hear(behind)
        return self._turns.plan(), heard

    @property
    def spare(self) -> float:
        return self._turns.spare(self._ahead)


def _check_device() -> None:
    """Raises if the device's context is gone: then no request can be served any more."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _give_up(scheduler: Scheduler, plan: StepPlan) -> list[Delta]:
    _check_device()
    log.exception("step %d failed; its requests are answered with an error", plan.number)
    return scheduler.fail(plan, "the engine could not compute this request; try again with a smaller input")


class Engine:
    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        checkpoint = open_checkpoint(config.model)
        machine = build_machine(config, checkpoint, progress=progress)
        self.info: EngineInfo = machine.info
        self.start_seconds = machine.seconds  # by part
        self._scheduler = machine.scheduler
        self._store = machine.store
        self._runner = machine.runner
        self._steps = None if config.step_log is None else StepLog(Path(config.step_log))
        on_gpu = self.info.device.startswith("cuda")
        watch: Watch = DeviceStopwatch(CudaMark) if on_gpu else Stopwatch()
        # A CPU computes a step while it is launched: there is nothing to be late for.
        pace = Pace() if on_gpu and machine.overlap else None
        self._turns = Turns(machine.scheduler, machine.runner, watch, self._steps, pace)
        self._loop: Loop = OverlappedLoop(self._turns) if machine.overlap else SerialLoop(self._turns)

    def submit(self, request: Request) -> None:
        """Queue a request; raises a RequestError when it can never be answered."""
        if self.idle:
            self._turns.rest()
        self._scheduler.add(request, lay_out_prompt(request))

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._scheduler.cancel(request_id)

    def step(self) -> list[Delta]:
        return self._scheduler.end_lost() + self._loop.step()

    @property
    def spare(self) -> float:
        """Seconds for which whoever may get more requests had better listen than step: the device is busy,
        and what comes meanwhile goes with the next step. To be asked again when they are over."""
        return self._loop.spare

    def prepare(self) -> bool:
        """For an idle engine: a moment's work that makes later steps faster; gives whether there was any."""
        return self.idle and self._runner.prepare()

    def picture(self, content: bytes) -> dict[str, int]:
        """How many views of a picture each tier keeps."""
        return self._store.count_by_tier(content)

    def forget(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """Views of a picture, and KV computed from them, are found by nobody any more. `then` is called,
        perhaps by another thread, once there is nothing left of them on disk."""
        self._scheduler.forget(content, then)

    @property
    def idle(self) -> bool:
        """No request is waiting, running or in flight."""
        return self._scheduler.idle

    @property
    def captured_steps(self) -> int:
        """Steps so far that ran as captured ones."""
        return self._runner.replays

    @property
    def costs(self) -> Coefficients:
        """What the parts of a step take, as learnt so far, in ms."""
        return self._scheduler.costs

    def stats(self) -> EngineStats:
        return replace(self._scheduler.stats(), to_prepare=self._runner.to_prepare)

    def close(self) -> None:
        """Features that wait to be written to disk are; the engine takes no more requests."""
        self._store.close()
        if self._steps is not None:
            self._steps.close()

    def check(self) -> None:
        """Verify the bookkeeping of every cache; for tests and idle moments."""
        self._scheduler.check()
