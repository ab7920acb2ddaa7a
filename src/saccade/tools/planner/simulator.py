"""Runs traffic on the real scheduler with a virtual clock: a step takes what the cost model says.

It computes no tokens: all are alike, only their number matters."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import RequestError
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.pool_sizing import VISION_SCOPES
from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.kv_cache.swap_space import SwapSpace
from saccade.metrics import EngineStats
from saccade.request import Delta
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.kv_manager import Caches
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.step_plan import EncodeTask, Role, StepOutput, StepPlan
from saccade.tools.planner.traffic import Arrival

TOKEN = 2  # of every answer


@dataclass(frozen=True)
class SimulatedMachine:
    limits: SchedulerConfig
    blocks: int
    feature_budget: int  # bytes
    feature_bytes: int  # per visual token
    truth: CostModel  # what steps take; it does not learn
    believed: CostModel  # what the scheduler predicts
    prefix_caching: bool = True
    vision: int = 0  # of the blocks, those of the pool for views
    roles: frozenset[Role] = VISION_SCOPES["all"]  # views of that pool
    swap_slots: int = 0  # KV blocks of host memory
    swap_seconds: float = 0.0  # to copy a block in either direction


@dataclass
class Latencies:
    """Of one kind of request, in seconds."""

    first: "array[float]" = field(default_factory=lambda: array("d"))  # arrival to first token
    between: "array[float]" = field(default_factory=lambda: array("d"))  # two successive tokens of one answer
    whole: "array[float]" = field(default_factory=lambda: array("d"))  # arrival to last token
    refused: int = 0


@dataclass
class SimulationResult:
    kinds: dict[str, Latencies] = field(default_factory=dict)
    seconds: float = 0.0  # on the virtual clock
    busy: float = 0.0  # of those, while a step ran
    peak_rows: int = 0
    peak_blocks: int = 0
    short_of: Counter[str] = field(default_factory=Counter)  # steps by the resource that requests waited for
    stats: EngineStats = field(default_factory=EngineStats)  # at the end

    @property
    def binds(self) -> str:
        """The resource that requests waited for most often, if in more than a tenth of the steps."""
        often = [what for what, steps in self.short_of.most_common() if steps > self.stats.steps / 10]
        return often[0] if often else "nothing"


class SwapLink:
    """Copies of KV blocks between device and host, one after the other, overlapping the steps."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # of a block
        self._free = 0.0  # when the last copy ends
        self._needed = 0.0  # when the blocks that the next step may read have arrived

    def swap(self, now: float, outs: int, ins: int, *, wait: bool) -> float:
        """Seconds that the step starting now waits for blocks to arrive."""
        start = max(now, self._needed)
        if outs or ins:
            self._free = max(self._free, start) + (outs + ins) * self._seconds
        if ins:
            self._needed = self._free
        return max(start, self._needed if wait else 0.0) - now


class LatencyRecorder:
    """Turns deltas of requests into the latencies of their kinds."""

    def __init__(self) -> None:
        self.result = SimulationResult()
        self._arrivals: dict[str, Arrival] = {}
        self._last_token: dict[str, float] = {}  # time of each running request's last token

    def submit(self, arrival: Arrival) -> None:
        self.result.kinds.setdefault(arrival.kind.name, Latencies())
        self._arrivals[arrival.request.id] = arrival

    def refuse(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.request.id]
        self.result.kinds[arrival.kind.name].refused += 1

    def record(self, delta: Delta, now: float) -> None:
        name = delta.request_id
        arrival = self._arrivals[name]
        latencies = self.result.kinds[arrival.kind.name]
        last = self._last_token.get(name)
        if last is None:
            latencies.first.append(now - arrival.at)
        else:
            latencies.between.append(now - last)
        self._last_token[name] = now
        if delta.finish:
            latencies.whole.append(now - arrival.at)
            del self._arrivals[name], self._last_token[name]


class Simulator:
    def __init__(self, machine: SimulatedMachine) -> None:
        self.now = 0.0
        self._machine = machine
        self._pool = BlockPool(machine.blocks, machine.vision, machine.roles)
        self._store: EncoderCache[None] = EncoderCache(machine.feature_budget)
        size = machine.limits.block_size
        prefix = PrefixCache(self._pool, size) if machine.prefix_caching else None
        self._unfinished: PartialViews[int] = PartialViews(machine.limits.max_encode_patches)
        self.scheduler = Scheduler(
            machine.limits,
            Caches(
                self._pool,
                prefix,
                self._store,
                self._unfinished,
                SwapSpace(machine.swap_slots, 2e3 * machine.swap_seconds),
            ),
            machine.believed,
            clock=lambda: self.now,
        )
        self._link = SwapLink(machine.swap_seconds)
        self._recorder = LatencyRecorder()
        self.result = self._recorder.result

    def run(self, traffic: Iterable[Arrival]) -> SimulationResult:
        """Runs until every request is answered."""
        arrivals = iter(traffic)
        following = next(arrivals, None)
        while following is not None or not self.scheduler.idle:
            while following is not None and following.at <= self.now:
                self._submit(following)
                following = next(arrivals, None)
            if not self.step() and following is not None:
                self.now = following.at
        return self.finish()

    def finish(self) -> SimulationResult:
        self.result.seconds, self.result.stats = self.now, self.scheduler.stats()
        return self.result

    def _submit(self, arrival: Arrival) -> None:
        self._recorder.submit(arrival)
        try:
            self.scheduler.add(arrival.request, lay_out_prompt(arrival.request))
        except RequestError:
            self._recorder.refuse(arrival)

    def step(self) -> bool:
        """Runs one step; False if there was nothing to compute."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        result = self.result
        for encode in plan.encodes:
            self._encode(encode)
        if shortage := self.scheduler.bottleneck:
            result.short_of[shortage] += 1
        result.peak_rows = max(result.peak_rows, len(plan.scheduled))
        result.peak_blocks = max(result.peak_blocks, self._pool.used)
        work = work_of(plan, self._machine.limits.encode_layers)
        seconds = self._machine.truth.predict(work) / 1e3
        seconds += self._link.swap(self.now, len(plan.swap_outs), len(plan.swap_ins), wait=plan.await_swaps)
        self.now += seconds
        result.busy += seconds
        for delta in self.scheduler.apply(plan, self.sample(plan), seconds):
            self.record(delta)
        return True

    def _encode(self, encode: EncodeTask) -> None:
        """All that is kept of a partly encoded view is how many of its layers are done."""
        if encode.first_layer and self._unfinished.take(encode.key) != encode.first_layer:
            raise RuntimeError(f"the slice from layer {encode.first_layer} does not follow the previous one")
        if encode.stop_layer is None:
            self._store.put(encode.key, None, encode.view.tokens * self._machine.feature_bytes)
        else:
            self._unfinished.keep(encode.key, encode.stop_layer)

    def record(self, delta: Delta) -> None:
        self._recorder.record(delta, self.now)

    def sample(self, plan: StepPlan) -> StepOutput:
        tokens = sum(row.sample for row in plan.scheduled)
        no_logprobs: Any = (None,) * tokens
        return StepOutput(plan.number, (TOKEN,) * tokens, no_logprobs)


def work_of(plan: StepPlan, layers: int) -> Work:
    """What the cost model needs of a plan; `layers` of the vision tower."""
    work = Work()
    for row in plan.scheduled:
        work.add_row(row.start, row.num_tokens)
    for encode in plan.encodes:
        work.add_view(encode.patches, encode.share(layers))
    return work
