"""Traffic on the real scheduler and a virtual clock: a step takes what its work costs.

takes   arrivals, the limits of an engine, what a step costs
gives   an `Outcome`: the waits of every kind, and what the engine was short of
owns    the clock
never   sleeps; computes a token (all are alike: only their number matters)
"""

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
from saccade.scheduler.scheduler import Limits, Scheduler
from saccade.step_plan import Encode, Role, StepPlan, StepResult
from saccade.tools.planner.traffic import Arrival

TOKEN = 2  # every answer consists of it


@dataclass(frozen=True)
class Machine:
    limits: Limits
    blocks: int
    feature_budget: int  # bytes
    feature_bytes: int  # per visual token
    truth: CostModel  # what steps take; it does not learn
    believed: CostModel  # what the scheduler thinks they take
    prefix_caching: bool = True
    vision: int = 0  # of the blocks, those of a pool for views
    roles: frozenset[Role] = VISION_SCOPES["all"]  # of these views
    swap_slots: int = 0  # KV blocks of host memory
    swap_seconds: float = 0.0  # to copy a block there, or back


@dataclass
class Waits:
    """Of one kind of requests, in seconds."""

    first: "array[float]" = field(default_factory=lambda: array("d"))  # arrival to first token
    between: "array[float]" = field(default_factory=lambda: array("d"))  # two successive tokens of one answer
    whole: "array[float]" = field(default_factory=lambda: array("d"))  # arrival to last token
    refused: int = 0


@dataclass
class Outcome:
    kinds: dict[str, Waits] = field(default_factory=dict)
    seconds: float = 0.0  # on the virtual clock
    busy: float = 0.0  # of those, a step ran
    peak_rows: int = 0
    peak_blocks: int = 0
    short_of: Counter[str] = field(default_factory=Counter)  # steps, by what kept somebody waiting in them
    stats: EngineStats = field(default_factory=EngineStats)  # at the end

    @property
    def binds(self) -> str:
        """What requests waited for in more than a tenth of the steps, most often first; else nothing."""
        often = [what for what, steps in self.short_of.most_common() if steps > self.stats.steps / 10]
        return often[0] if often else "nothing"


class Link:
    """Between the device's memory and the host's: one copy after the other, beside the steps."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # of a block
        self._free = 0.0  # when it has done what it was asked to
        self._needed = 0.0  # when the blocks are there that the next step may read

    def swap(self, now: float, outs: int, ins: int, *, wait: bool) -> float:
        """How long the step that begins now waits for blocks to come in, of steps before or its own."""
        begins = max(now, self._needed)
        if outs or ins:
            self._free = max(self._free, begins) + (outs + ins) * self._seconds
        if ins:
            self._needed = self._free
        return max(begins, self._needed if wait else 0.0) - now


class Player:
    def __init__(self, machine: Machine) -> None:
        self.now = 0.0
        self._machine = machine
        self._pool = BlockPool(machine.blocks, machine.vision, machine.roles)
        self._store: EncoderCache[None] = EncoderCache(machine.feature_budget)
        size = machine.limits.block_size
        prefix = PrefixCache(self._pool, size) if machine.prefix_caching else None
        self._unfinished: PartialViews[int] = PartialViews(machine.limits.max_encode_patches)
        self.scheduler = Scheduler(
            machine.limits,
            self._pool,
            prefix,
            self._store,
            machine.believed,
            clock=lambda: self.now,
            unfinished=self._unfinished,
            swap=SwapSpace(machine.swap_slots, 2e3 * machine.swap_seconds),
        )
        self._link = Link(machine.swap_seconds)
        self._asked: dict[str, Arrival] = {}
        self._spoke: dict[str, float] = {}  # when each running answer's last token came
        self.outcome = Outcome()

    def run(self, traffic: Iterable[Arrival]) -> Outcome:
        """Until everything that comes is answered."""
        coming = iter(traffic)
        following = next(coming, None)
        while following is not None or not self.scheduler.idle:
            while following is not None and following.at <= self.now:
                self._ask(following)
                following = next(coming, None)
            if not self.step() and following is not None:
                self.now = following.at
        return self.finish()

    def finish(self) -> Outcome:
        self.outcome.seconds, self.outcome.stats = self.now, self.scheduler.stats()
        return self.outcome

    def _ask(self, arrival: Arrival) -> None:
        waits = self.outcome.kinds.setdefault(arrival.kind.name, Waits())
        try:
            self.scheduler.add(arrival.request, lay_out_prompt(arrival.request))
        except RequestError:
            waits.refused += 1
        else:
            self._asked[arrival.request.id] = arrival

    def step(self) -> bool:
        """One step, if there is anything to compute."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        outcome = self.outcome
        for encode in plan.encodes:
            self._encode(encode)
        if shortage := self.scheduler.short_of:
            outcome.short_of[shortage] += 1
        outcome.peak_rows = max(outcome.peak_rows, len(plan.rows))
        outcome.peak_blocks = max(outcome.peak_blocks, self._pool.used)
        work = work_of(plan, self._machine.limits.encode_layers)
        seconds = self._machine.truth.predict(work) / 1e3
        seconds += self._link.swap(self.now, len(plan.swap_outs), len(plan.swap_ins), wait=plan.await_swaps)
        self.now += seconds
        outcome.busy += seconds
        for delta in self.scheduler.apply(plan, sampled(plan), seconds):
            self._hear(delta)
        return True

    def _encode(self, encode: Encode) -> None:
        """The simulated tower has nothing to keep of a view but how many of its layers are done."""
        if encode.first and self._unfinished.take(encode.key) != encode.first:
            raise RuntimeError(f"a slice from layer {encode.first} on does not follow the one before")
        if encode.stop is None:
            self._store.put(encode.key, None, encode.view.tokens * self._machine.feature_bytes)
        else:
            self._unfinished.keep(encode.key, encode.stop)

    def _hear(self, delta: Delta) -> None:
        name = delta.request_id
        arrival = self._asked[name]
        waits = self.outcome.kinds[arrival.kind.name]
        spoke = self._spoke.get(name)
        if spoke is None:
            waits.first.append(self.now - arrival.at)
        else:
            waits.between.append(self.now - spoke)
        self._spoke[name] = self.now
        if delta.finish:
            waits.whole.append(self.now - arrival.at)
            del self._asked[name], self._spoke[name]


def work_of(plan: StepPlan, layers: int) -> Work:
    """`layers`: of the vision tower."""
    work = Work()
    for row in plan.rows:
        work.add_row(row.start, row.count)
    for encode in plan.encodes:
        work.add_view(encode.patches, encode.share(layers))
    return work


def sampled(plan: StepPlan) -> StepResult:
    tokens = sum(row.sample for row in plan.rows)
    nothing: Any = (None,) * tokens
    return StepResult(plan.number, (TOKEN,) * tokens, nothing)
