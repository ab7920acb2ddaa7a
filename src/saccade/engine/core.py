"""The engine core: queues requests, and steps them through scheduler and executor."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.engine.builder import build_engine
from saccade.engine.ipc import EngineInfo
from saccade.engine.pacing import StepPacer
from saccade.engine.step_log import StepLog
from saccade.executor.executor import Executor, StepFuture
from saccade.metrics import EngineStats
from saccade.request import Delta, Request
from saccade.scheduler.cost_model import Coefficients
from saccade.scheduler.scheduler import Scheduler
from saccade.step_plan import StepOutput, StepPlan

log = logging.getLogger(__name__)


class TimerEvent(Protocol):
    """A point in the work of a device."""

    def seconds_until(self, later: "TimerEvent") -> float:
        """Waits for the later one."""


class HostTimerEvent:
    """For a CPU, which has computed a step when its launch returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._time = clock()

    def seconds_until(self, later: TimerEvent) -> float:
        if not isinstance(later, HostTimerEvent):
            raise TypeError(f"a {type(later).__name__} is not an event of the host")
        return later._time - self._time


class CudaTimerEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def seconds_until(self, later: TimerEvent) -> float:
        if not isinstance(later, CudaTimerEvent):
            raise TypeError(f"a {type(later).__name__} is not a CUDA event")
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


class StepTimer:
    """How long each step takes on the device, by events before and behind its launch.

    The output of a step that samples nothing is available without waiting for the device: its end is not
    seen, and its time counts to the next step that does sample.
    """

    def __init__(self, record: Callable[[], TimerEvent]) -> None:
        self._record = record
        self._begun: TimerEvent | None = None  # of the step being launched
        self._running: deque[tuple[TimerEvent, TimerEvent]] = deque()  # begin and end, oldest step first
        self._since: TimerEvent | None = None  # begin of steps not yet accounted for

    def launch_started(self) -> None:
        self._begun = self._record()

    def launched(self) -> None:
        if self._begun is None:
            raise RuntimeError("launched() without launch_started()")
        self._running.append((self._begun, self._record()))
        self._begun = None

    def finished(self, *, waited: bool) -> float | None:
        """The output of the oldest running step is there; `waited`: by waiting for the device. Returns the
        step's seconds, None where its end was not seen."""
        first, last = self._running.popleft()
        first = self._since or first
        self._since = None if waited else first
        return first.seconds_until(last) if waited else None

    def failed(self) -> None:
        """A step failed, the one being launched or else the oldest running one: discard its time."""
        if self._begun is not None:
            self._begun = None
        elif self._running:
            self._running.popleft()
        self._since = None

    def idle(self) -> None:
        """Nothing runs: the next step begins when it is launched."""
        self._since = None


class StepMonitor:
    """Times every step, writes the step log if there is one, and paces planning if that is on."""

    def __init__(self, timer: StepTimer, log: StepLog | None = None, pacer: StepPacer | None = None) -> None:
        self.timer, self._log, self._pacer = timer, log, pacer

    def planning_delay(self, running: StepFuture | None) -> float:
        """Seconds for which the step after a running one need not be planned."""
        if self._pacer is None or running is None or running.done:
            return 0.0
        return self._pacer.delay

    def planning_started(self) -> None:
        if self._pacer is not None:
            self._pacer.planning_started()
        if self._log is not None:
            self._log.planning_started()

    def planned(self) -> None:
        if self._log is not None:
            self._log.planned()

    def launched(self, step: StepFuture) -> None:
        if self._pacer is not None:
            self._pacer.launched(step.plan.expected_ms)
        if self._log is not None:
            self._log.launched(step.plan, captured=step.is_graph)

    def finished(self, step: StepFuture, output: StepOutput, waited: float) -> float | None:
        """`waited`: seconds the host waited for the output. Returns the step's seconds; None where its end
        was not seen, because it has no output that the host waits for."""
        end_seen = bool(output.tokens or output.relevance)
        seconds = self.timer.finished(waited=end_seen)
        if self._pacer is not None:
            self._pacer.finished(waited if end_seen else None)
        if self._log is not None:
            self._log.finished(step.plan, seconds)
        return seconds

    def failed(self, *, launched: bool) -> None:
        self.timer.failed()
        if self._pacer is not None and launched:
            self._pacer.finished(None)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class StepStages:
    """The stages of a step, which both loops put in order: schedule, execute, update."""

    def __init__(self, scheduler: Scheduler, executor: Executor, monitor: StepMonitor) -> None:
        self._scheduler, self._executor, self._monitor = scheduler, executor, monitor

    def schedule(self) -> StepPlan | None:
        self._monitor.planning_started()
        plan = self._scheduler.plan()
        self._monitor.planned()
        return plan

    def execute(self, plan: StepPlan | None) -> tuple[StepFuture | None, list[Delta]]:
        """The running step, and errors: of requests whose view could not be encoded, or of all requests of a
        step that could not be launched."""
        if plan is None:
            self._scheduler.wait_for_fetches()
            return None, []
        self._monitor.timer.launch_started()
        errors: list[Delta] = []
        try:
            failed = self._executor.encode(plan)
            if failed:
                self._executor.check_device()
                plan, errors = self._scheduler.fail_views(plan, failed)
            step = self._executor.execute(plan)
            self._monitor.timer.launched()
            if plan.early_exit:
                self._executor.prefetch(plan)
        except Exception:
            self._monitor.failed(launched=False)
            return None, errors + self._fail(plan)
        self._monitor.launched(step)
        self._scheduler.update_cost_model()
        return step, errors

    def update(self, step: StepFuture | None) -> list[Delta]:
        if step is None:
            return []
        began = time.perf_counter()
        try:
            output = step.wait()
        except Exception:
            self._monitor.failed(launched=True)
            return self._fail(step.plan)
        seconds = self._monitor.finished(step, output, time.perf_counter() - began)
        return self._scheduler.apply(step.plan, output, seconds)

    def update_relevance(self, step: StepFuture) -> list[Delta]:
        """The same with the step's relevance alone, which is there before the step's end."""
        try:
            relevance = step.wait_relevance()
        except Exception:  # `update` meets it too
            return []
        return self._scheduler.apply_relevance(step.plan, relevance)

    @property
    def requests_waiting(self) -> bool:
        """Whether there are requests without a slot."""
        return self._scheduler.bottleneck is not None

    def _fail(self, plan: StepPlan) -> list[Delta]:
        self._executor.check_device()
        log.exception("step %d failed; its requests are answered with an error", plan.number)
        text = "the engine could not compute this request; try again with a smaller input"
        return self._scheduler.fail(plan, text)


class SerialLoop:
    """Schedule, execute, update. Nothing is in flight between steps."""

    def __init__(self, stages: StepStages) -> None:
        self._stages = stages
        self.running: StepFuture | None = None

    def step(self) -> list[Delta]:
        plan = self._stages.schedule()
        running, errors = self._stages.execute(plan)
        return self._stages.update(running) + errors


class OverlappedLoop:
    """Step N+1 is scheduled and launched before the output of N is known.

    N+1 reads the token sampled in N on the device. A stop condition found late costs one wasted token. If
    nothing can be scheduled without the relevance that N computes, the loop waits for that alone, so that the
    views chosen by it are in N+1. After an early-exit step, which has no other output, they are launched in
    the same call.
    """

    def __init__(self, stages: StepStages) -> None:
        self._stages = stages
        self.running: StepFuture | None = None

    def step(self) -> list[Delta]:
        previous = self.running
        plan = self._stages.schedule()
        deltas: list[Delta] = []
        if plan is None and previous is not None and self._should_await_relevance(previous):
            deltas = self._stages.update_relevance(previous)
            plan = self._stages.schedule()
        self.running, errors = self._stages.execute(plan)
        # Errors are returned at once: the engine may be idle afterwards, and an idle engine is not stepped.
        deltas += self._stages.update(previous) + errors
        if plan is None and not deltas and previous is not None and previous.has_relevance:
            self.running, deltas = self._stages.execute(self._stages.schedule())
        return deltas

    def _should_await_relevance(self, step: StepFuture) -> bool:
        """Not if requests wait: they may need what the step computes, which they find once it is updated."""
        return step.has_relevance and not step.plan.early_exit and not self._stages.requests_waiting


class Engine:
    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        checkpoint = open_checkpoint(config.model)
        parts = build_engine(config, checkpoint, progress=progress)
        self.info: EngineInfo = parts.info
        self.start_seconds = parts.seconds
        self._scheduler, self._executor = parts.scheduler, parts.executor
        self._encoder_cache = parts.encoder_cache
        on_gpu = self.info.device.startswith("cuda")
        self._monitor = StepMonitor(
            StepTimer(CudaTimerEvent if on_gpu else HostTimerEvent),
            None if config.step_log is None else StepLog(Path(config.step_log)),
            # A CPU computes a step while it is launched: delaying the next plan gains nothing.
            StepPacer() if on_gpu and parts.overlap else None,
        )
        stages = StepStages(self._scheduler, self._executor, self._monitor)
        self._loop = OverlappedLoop(stages) if parts.overlap else SerialLoop(stages)

    def submit(self, request: Request) -> None:
        """Queue a request; raises a RequestError if it can never be answered."""
        if self.idle:  # the time since the last step is no step's
            self._monitor.timer.idle()
            self._scheduler.discard_untimed()
        self._scheduler.add(request, lay_out_prompt(request))

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._scheduler.cancel(request_id)

    def step(self) -> list[Delta]:
        return self._scheduler.poll() + self._loop.step()

    @property
    def planning_delay(self) -> float:
        """Seconds to wait for requests before the next `step`: the device is busy, and requests that arrive
        meanwhile join the next step. To be read again when they are over."""
        return self._monitor.planning_delay(self._loop.running)

    def warm_up(self) -> bool:
        """If idle, compile or capture one more step; returns whether there was one."""
        return self.idle and self._executor.warm_up()

    def image_tiers(self, content: bytes) -> dict[str, int]:
        """How many views of an image each cache tier holds."""
        return self._encoder_cache.count_by_tier(content)

    def delete_image(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """Delete the views of an image and the KV computed from them. `then` is called, perhaps by another
        thread, once nothing of them is left on disk."""
        self._scheduler.delete_image(content, then)

    @property
    def idle(self) -> bool:
        """No request is waiting, running or in flight."""
        return self._scheduler.idle

    @property
    def graph_replays(self) -> int:
        """Steps so far that were replays of a CUDA graph."""
        return self._executor.graph_replays

    @property
    def costs(self) -> Coefficients:
        """What the parts of a step cost, as learnt so far, in ms."""
        return self._scheduler.costs

    def stats(self) -> EngineStats:
        return replace(self._scheduler.stats(), to_prepare=self._executor.pending_warmups)

    def close(self) -> None:
        """Write features that wait for the disk; the engine accepts no more requests."""
        self._encoder_cache.close()
        self._monitor.close()

    def check(self) -> None:
        """Verify the bookkeeping of every cache; for tests."""
        self._scheduler.check()
