"""The scheduler: which rows the next step computes, and what its result means for the requests.

takes   requests with their layouts, cancellations, step results
gives   step plans, deltas
owns    the queue, the running sequences, the device rows
never   touches the device, reads the clock, or waits

There are no phases: a sequence catches up from `computed` to `length`, be that a prompt, a piece of one,
the next token, or everything again after it had to give way.
"""

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from saccade.cache.blocks import BlockPool
from saccade.cache.prefix import PrefixCache
from saccade.errors import InvalidValue, Overloaded
from saccade.metrics import EngineStats
from saccade.plan import Layout, StepPlan, StepResult
from saccade.request import Delta, FinishReason, Request, TokenLogprobs
from saccade.schedule import policy
from saccade.schedule.holdings import Holdings
from saccade.schedule.policy import Limits
from saccade.schedule.sequence import Group, Sequence, derive_seed
from saccade.schedule.step import Planned, Step
from saccade.vision.store import FeatureStore

__all__ = ["Limits", "Scheduler"]

MAX_IN_FLIGHT = 2  # steps; beyond, a sequence would have to go on from a token two steps ahead of the host


@dataclass
class _Totals:
    """What only grows; names as in EngineStats."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    visual_tokens: int = 0
    steps: int = 0
    encodes: int = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.handle


class Scheduler:
    def __init__(
        self, limits: Limits, pool: BlockPool, prefix: PrefixCache | None, store: FeatureStore[Any]
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._prefix = prefix
        self._store = store
        self._holdings = Holdings(limits, pool, prefix, store)
        self._groups: dict[str, Group] = {}  # by request id
        self._waiting: list[Sequence] = []  # in order of arrival, as are the running
        self._running: list[Sequence] = []
        self._free_rows = list(range(limits.max_rows))  # a heap: low rows first
        self._in_flight: dict[int, list[Planned]] = {}  # by plan number, oldest first
        self._handles = count()
        self._totals = _Totals()

    # Requests come and go

    def add(self, request: Request, layout: Layout) -> None:
        """Queue a request; raises a RequestError if it can never be answered, or not now."""
        policy.refuse_impossible(request, layout, self._limits, self._pool.count)
        if request.id in self._groups:
            raise InvalidValue(f"a request with the id {request.id!r} is being answered already", param="id")
        waiting = len(self._groups) - self._running_requests
        if waiting >= self._limits.max_queue:
            raise Overloaded(
                f"{waiting} requests are waiting and the queue holds {self._limits.max_queue}; "
                "try again later"
            )
        group = Group(request, layout, {media.view.key: media.pixels for media in request.media})
        limit = min(len(layout.tokens) + request.sampling.max_tokens, self._limits.max_model_len)
        for index in range(request.sampling.n):
            seed = derive_seed(request.sampling, self._limits.seed, request.id, index)
            chain = self._prefix.chain(request.salt, layout.spans) if self._prefix is not None else None
            tokens = list(layout.tokens)
            group.choices.append(Sequence(next(self._handles), group, index, seed, limit, chain, tokens))
        self._groups[request.id] = group
        self._waiting += group.choices

    def cancel(self, request_id: str) -> list[Delta]:
        """End a request now and free all it holds; no news if it has ended already."""
        return self._end_request(request_id, "cancelled")

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step could not be run, or its result not be had: its requests end with an error."""
        planned = self._in_flight.pop(plan.number)
        requests = dict.fromkeys(
            item.sequence.group.request.id for item in planned if not item.sequence.ended
        )
        return [delta for request_id in requests for delta in self._end_request(request_id, "error", message)]

    # One step

    def plan(self) -> StepPlan | None:
        """The next step, or None while there is nothing to compute. May be called with one step in flight:
        the tokens that step samples count as known, though only the device knows them."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight; apply one before planning another"
            )
        step = Step(self._limits.max_step_tokens, self._limits.max_encode_patches)
        self._carry_on(step)
        self._admit(step)
        return self._send_off(step)

    def _carry_on(self, step: Step) -> None:
        """The running sequences, oldest first."""
        place = 0
        while place < len(self._running):  # it shrinks from its end when somebody gives way
            sequence = self._running[place]
            place += 1
            tokens = policy.chunk(sequence.remaining, step.tokens_left, behind=len(self._running) - place)
            tokens = self._make_room(sequence, tokens)
            tokens = self._holdings.see(step, sequence, tokens)
            if tokens:
                self._run(step, sequence, tokens)

    def _make_room(self, sequence: Sequence, tokens: int) -> int:
        """How many of its next `tokens` have a place, once later arrivals have given way as far as needed.
        The latest of all waits with what it holds: whoever came before it takes that if need be."""
        stop = sequence.computed + tokens
        while self._holdings.lacks(sequence, stop) and policy.victim(self._running) is not sequence:
            self._give_way(policy.victim(self._running))
        return min(stop, self._holdings.places(sequence)) - sequence.computed

    def _admit(self, step: Step) -> None:
        """The waiting sequences in order of arrival, up to the first that does not fit."""
        owed = sum(self._holdings.owes(sequence) for sequence in self._running)
        for sequence in tuple(self._waiting):
            if not step.tokens_left or not self._free_rows:
                return
            if not sequence.may_enter():
                continue
            if not self._enter(step, sequence, owed):
                return
            owed += self._holdings.owes(sequence)

    def _enter(self, step: Step, sequence: Sequence, owed: int) -> bool:
        """A row and first tokens for a waiting sequence; False, and nothing changed, if they do not fit."""
        if not self._holdings.begin(sequence, owed):
            return False
        tokens = policy.chunk(sequence.remaining, step.tokens_left, behind=0)
        tokens = self._holdings.see(step, sequence, tokens)
        if not tokens:
            self._holdings.drop(sequence)
            return False
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_arrival)
        sequence.row = heappop(self._free_rows)
        step.enter.append(sequence.enter())
        self._count_start(sequence)
        self._holdings.copy_on_write(step, sequence)
        self._run(step, sequence, tokens)
        return True

    def _run(self, step: Step, sequence: Sequence, tokens: int) -> None:
        row = sequence.next_row(tokens)
        self._holdings.extend(sequence, row.start + row.count)
        step.run(sequence, row, changed=sequence.stale)
        sequence.stale = []

    def _send_off(self, step: Step) -> StepPlan | None:
        if not step.planned:
            return None
        plan = step.plan(self._totals.steps)
        self._holdings.copied(step)
        for sequence, _, row in step.planned:
            sequence.computed += row.count
            sequence.pending += row.sample
        self._in_flight[plan.number] = step.planned
        self._totals.steps += 1
        self._totals.encodes += len(plan.encodes)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Learn what a step sampled; results come in the order of the plans."""
        oldest = next(iter(self._in_flight), None)
        if not oldest == plan.number == result.number:
            raise RuntimeError(f"step {oldest} is next to be applied, not {plan.number} with {result.number}")
        planned = self._in_flight.pop(plan.number)
        asked = sum(item.row.sample for item in planned)
        if not asked == len(result.tokens) == len(result.logprobs):
            raise RuntimeError(f"step {oldest} samples {asked} tokens, but {len(result.tokens)} came back")
        samples = zip(result.tokens, result.logprobs, strict=True)
        deltas = []
        for sequence, epoch, row in planned:
            sample = next(samples) if row.sample else None
            if sequence.ended:
                continue  # stopped or cancelled meanwhile: the row was wasted
            if sample:  # also for one that gave way meanwhile: the token is its own, it goes on from there
                sequence.pending -= 1
                sequence.tokens.append(sample[0])
            if sequence.epoch == epoch:
                self._holdings.settle(sequence, row.start + row.count)
            if sample:
                deltas.append(self._news(sequence, *sample))
        return deltas

    def _news(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Delta:
        self._totals.generated_tokens += 1
        group = sequence.group
        cached, group.cached = group.cached, 0
        finish = sequence.finish()
        if finish:
            self._end(sequence)
        return Delta(
            request_id=group.request.id,
            index=sequence.index,
            tokens=(token,),
            logprobs=(logprobs,) if logprobs else (),
            finish=finish,
            cached_tokens=cached,
        )

    # Leaving

    def _give_way(self, sequence: Sequence) -> None:
        """Back to the queue, before all that have never run, to compute everything again."""
        self._leave(sequence)
        insort(self._waiting, sequence, key=_arrival)
        self._totals.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        if sequence.row is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        heappush(self._free_rows, sequence.row)
        sequence.row = None
        sequence.epoch += 1
        self._holdings.drop(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._leave(sequence)
        group = sequence.group
        group.choices.remove(sequence)
        if not group.choices:
            del self._groups[group.request.id]

    def _end_request(self, request_id: str, finish: FinishReason, error: str | None = None) -> list[Delta]:
        group = self._groups.get(request_id)
        ending = list(group.choices) if group else []
        for sequence in ending:
            self._end(sequence)
        return [
            Delta(request_id=request_id, index=sequence.index, finish=finish, error=error)
            for sequence in ending
        ]

    # How it stands

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no step in flight."""
        return not self._groups and not self._in_flight

    @property
    def _running_requests(self) -> int:
        return len({sequence.group.request.id for sequence in self._running})

    def _count_start(self, sequence: Sequence) -> None:
        group = sequence.group
        if group.started:
            return
        group.started = True
        group.cached = sequence.computed
        self._totals.prompt_tokens += sequence.prompt_length
        self._totals.visual_tokens += sum(span.view.tokens for span in group.layout.spans)
        if self._prefix is not None:
            self._totals.prefix_queried_tokens += sequence.prompt_length
            self._totals.prefix_hit_tokens += sequence.computed

    def stats(self) -> EngineStats:
        features = self._store.stats
        running = self._running_requests
        return EngineStats(
            waiting=len(self._groups) - running,
            running=running,
            blocks_used=self._pool.used,
            blocks_cached=self._pool.kept,
            blocks_free=self._pool.free,
            feature_bytes=features.bytes,
            feature_hits=features.hits,
            feature_misses=features.misses,
            **vars(self._totals),
        )

    def check(self) -> None:
        """Raise if any bookkeeping contradicts another; for tests and idle moments."""
        self._holdings.check(self._running)
        everyone = {sequence for group in self._groups.values() for sequence in group.choices}
        rows = [sequence.row for sequence in self._running]
        faults = []
        if len(self._waiting) + len(self._running) != len(everyone) or everyone != {
            *self._waiting,
            *self._running,
        }:
            faults.append("a sequence is not either waiting or running")
        if sorted([*self._free_rows, *(-1 if row is None else row for row in rows)]) != list(
            range(self._limits.max_rows)
        ):
            faults.append("a device row is not either free or one sequence's")
        if any(item.row is not None or item.blocks or item.pins or item.computed for item in self._waiting):
            faults.append("a waiting sequence holds something")
        for line in (self._waiting, self._running):
            if line != sorted(line, key=_arrival):
                faults.append("a line is out of the order of arrival")
        if any(item.ended or item.pending > len(self._in_flight) for item in everyone):
            faults.append("a sequence waits for a token that is not on its way")
        if faults:
            raise RuntimeError("scheduler: " + "; ".join(faults))
