"""The scheduler: which rows the next step computes, and what its result means for the requests.

takes   requests with their layouts, cancellations, step results and how long they took
gives   step plans, deltas
owns    the requests; the two queues, the running sequences and the device rows (places.py)
never   touches the device, or waits; its only clock is the one it is given

There are no phases: a sequence catches up from `computed` to `length`, be that a prompt, a piece of one,
the next token, or everything again after it had to give way. It takes the blocks of all its known tokens
when it enters, so only a growing answer can find the pool empty, and only for one block at a time.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from itertools import count
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.errors import InvalidValue
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.kv_cache.swap_space import SwapSpace
from saccade.lod.types import RelevanceMaps
from saccade.metrics import EngineStats
from saccade.request import Delta, FinishReason, Request
from saccade.scheduler import failures as failing
from saccade.scheduler import policy
from saccade.scheduler.admission import Admission
from saccade.scheduler.arrivals import Arrivals
from saccade.scheduler.choices import choices_of
from saccade.scheduler.cost_model import Coefficients, CostModel
from saccade.scheduler.cost_prior import UNKNOWN
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.lod_choice import Looking
from saccade.scheduler.lod_results import Hearing
from saccade.scheduler.named_images import CODE, GONE
from saccade.scheduler.outputs import last_news, news
from saccade.scheduler.policy import Limits
from saccade.scheduler.prefix_wait import Coming
from saccade.scheduler.queues import Places
from saccade.scheduler.sequence import Group, Sequence, group_of
from saccade.scheduler.stats import Totals
from saccade.scheduler.step_builder import Step, looking_faults
from saccade.scheduler.swap_policy import Swapping
from saccade.step_plan import PromptLayout, StepOutput, StepPlan

__all__ = ["Limits", "Scheduler"]

UNSOUND = "the model computed values that are not numbers; try another dtype or a shorter input"
CLASSES = (False, True)  # without, and with views to encode
MAX_IN_FLIGHT = 2  # steps; beyond, a sequence would have to go on from a token two steps ahead of the host


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        prefix: PrefixCache | None,
        store: EncoderCache[Any],
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        unfinished: PartialViews[Any] | None = None,
        swap: SwapSpace | None = None,
        looking: Looking | None = None,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._prefix = prefix
        self._store = store
        self._cost = cost if cost is not None else CostModel(UNKNOWN)
        swapping = Swapping(limits, pool, store, self._cost, swap)
        self._holdings = Holdings(limits, pool, prefix, store, swapping, unfinished)
        self.forget = self._holdings.forget  # of a deleted picture
        self._clock = clock
        self.looking = looking if looking is not None else Looking()
        self._groups: dict[str, Group] = {}  # by request id
        self._pixel_bytes = 0  # of all groups
        self._places = Places(limits.max_rows)
        self._in_flight: dict[int, Step] = {}  # by plan number, oldest first
        self._handles = count()
        self._totals = Totals()
        self._arrivals = Arrivals()
        self.forget_untimed = self._totals.forget_untimed  # of steps nobody waited for
        self._hearing = Hearing(
            limits, self._holdings, self._totals, clock, lambda: self.looking, self._end_request
        )
        self._admission = Admission(
            limits,
            self._places,
            self._holdings,
            Coming(limits, prefix),
            self._cost,
            self._totals,
            clock,
            self._queue,
        )

    # Requests come and go

    def add(self, request: Request, layout: PromptLayout) -> None:
        """Queue a request; raises a RequestError if it can never be answered, or not now."""
        policy.refuse_impossible(request, layout, self._limits, self._pool.count)
        if request.id in self._groups:
            raise InvalidValue(f"a request with the id {request.id!r} is being answered already", param="id")
        group = group_of(request, layout, since=self._clock())
        group.pixel_bytes += self._holdings.named.weight(group)
        waiting = len(self._groups) - self._places.running_requests
        policy.refuse_too_many(waiting, self._pixel_bytes, group.pixel_bytes, self._limits)
        group.choices = choices_of(group, self._limits, self._prefix, self._handles)
        self._holdings.admit(group)
        self._groups[request.id] = group
        self._pixel_bytes += group.pixel_bytes
        self._totals.came(group)
        for sequence in group.choices:
            self._queue(sequence)
        if not group.choices[0].encoding:
            self._arrivals.came(group.since)

    def _queue(self, sequence: Sequence) -> None:
        """Into the line of its class as things stand; choices of one request need its views once."""
        first = sequence.group.choices[0]
        encoding = self._holdings.queue(first) if sequence is first else first.encoding
        self._places.queue(sequence, encoding=encoding)

    def cancel(self, request_id: str) -> list[Delta]:
        """End a request now and free all it holds; no news if it has ended already."""
        return self._end_request(request_id, "cancelled")

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step could not be run, or its result not be had: its requests end with an error."""
        self._totals.forget_untimed()
        step = self._in_flight.pop(plan.number)
        return self._apologise(failing.hit_by_step(step, message, self._holdings))

    def fail_views(self, plan: StepPlan, failed: Mapping[bytes, str]) -> tuple[StepPlan, list[Delta]]:
        """Views of the step planned last could not be made (by key: why): requests that need one end with an
        error. Gives what is left of the step, to be run in its place."""
        step = self._in_flight[plan.number]
        told = self._apologise(failing.hit_by_views(step, failed, self._holdings), failing.CODE)
        self._totals.failed(step, failed)
        return step.without(plan, failed), told

    # One step

    def plan(self) -> StepPlan | None:
        """The next step, or None while there is nothing to compute. May be called with one step in flight:
        the tokens that step samples count as known, though only the device knows them."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight; apply one before planning another"
            )
        self._holdings.poll()
        step = Step(self._limits.max_step_tokens, self._limits.max_encode_patches, self._cost)
        prompts = self._stream(step)
        self._catch_up(step, prompts)
        return self._send_off(step)

    def _stream(self, step: Step) -> tuple[list[Sequence], list[Sequence]]:
        """The next token of every running answer, first by rank; gives the others that run, by class."""
        streams: list[Sequence] = []
        prompts: tuple[list[Sequence], list[Sequence]] = ([], [])
        for sequence in self._places.running:
            remaining = sequence.remaining
            if remaining == 1 and sequence.computed >= sequence.prompt_length:
                streams.append(sequence)
            elif remaining:
                prompts[sequence.encoding].append(sequence)
        block_size = self._limits.block_size
        reserve = 1 if prompts[0] or prompts[1] else 0  # so that prompts move however small the budget
        for sequence in streams:
            if step.tokens_left <= reserve:
                break
            if sequence.row is None:
                continue  # it has given way meanwhile
            if len(sequence.blocks) * block_size > sequence.computed or self._make_room(sequence):
                step.run(sequence, sequence.next_row(1))
        if step.singles and self._limits.step_target is not None:
            waited = self._places.longest_wait(prompts, self._clock())
            step.target = self._limits.stretched(waited)
            step.spares = self._limits.spares_texts(self._arrivals.share, waited)
            step.tokens_left = min(step.tokens_left, self._limits.stream_tokens)
        elif not step.singles:
            now = self._clock()
            rate, waited = self._arrivals.rate(now), self._places.longest_wait(prompts, now)
            step.quiet = self._limits.while_quiet(rate, step.milliseconds, waited)
        return prompts

    def _make_room(self, sequence: Sequence) -> bool:
        """Take a block for its next token, once others behind it have given way if need be. The last of all
        waits with what it holds: whoever is before it takes that if need be. Who gives way has no row in this
        step yet: streams get theirs in order of rank, prompts after them."""
        stop = sequence.computed + 1
        while self._holdings.lacks(sequence, stop):
            victim = policy.victim(self._places.running, sequence, self._holdings.frees)
            if victim is sequence:
                return False
            self._give_way(victim)
        self._holdings.extend(sequence, stop)
        return True

    def _catch_up(self, step: Step, prompts: tuple[list[Sequence], list[Sequence]]) -> None:
        """Prompts, within what their class may add to the step: those that run, then those that wait."""
        places = self._places
        both = all(
            prompts[kind] or (places.waiting[kind] and places.free_rows and not places.starved[kind])
            for kind in CLASSES
        )
        self._serve(step, prompts, both=both)
        if both and not step.planned:  # what was set aside for one class could not be used by it
            self._serve(step, prompts, both=False)
        if step.target is not None:
            self._arrivals.ran(some=any(not one.encoding for one, _, _ in step.longer))

    def _serve(self, step: Step, prompts: tuple[list[Sequence], list[Sequence]], *, both: bool) -> None:
        allowances = policy.allowances(
            self._limits,
            step.tokens_left,
            step.milliseconds if step.target is not None else 0.0,
            step.target,
            both=both,
            turn=self._totals.steps,
        )
        for kind in CLASSES:
            if kind and step.quiet is not None:
                allowances[kind].until = step.milliseconds + step.quiet
            elif kind and step.longer and step.spares:
                allowances[kind].until = step.views_until = step.milliseconds
            for sequence in prompts[kind]:
                still = sequence.row is not None  # it may have given way
                portion = self._holdings.portion(step, sequence, allowances[kind]) if still else 0
                if portion:
                    step.run(sequence, sequence.next_row(portion))
            if self._places.waiting[kind]:
                self._admission.admit(step, kind, allowances[kind])

    def rest(self) -> None:
        """For the loop, when there was nothing to plan: somebody may wait for features on disk."""
        self._store.wait()

    def study(self) -> None:
        """For the loop, when a step has been launched and there is time: learn what the last one took."""
        self._totals.study(self._cost)

    def _send_off(self, step: Step) -> StepPlan | None:
        planned = step.planned
        if not planned:
            return None
        self._holdings.swapping.sent(step)
        plan = step.plan(self._totals.steps, self._limits.brief)
        self._holdings.copied(step)
        for sequence, _, row in planned:
            sequence.looking = plan.early_exit
            sequence.computed += row.num_tokens * (not plan.early_exit)
            sequence.pending += row.sample
        self._holdings.making.sweep()
        self._in_flight[plan.number] = step
        self._totals.sent(plan)
        return plan

    def hear(self, plan: StepPlan, looks: Ordered[tuple[RelevanceMaps, ...]]) -> list[Delta]:
        """What a step in flight saw, before the rest of its result is known: the next one goes on from there.
        Once for a step; where it is not called, `apply` does the same."""
        return self._hearing.hear(self._in_flight[plan.number], looks)

    def apply(self, plan: StepPlan, result: StepOutput, seconds: float | None = None) -> list[Delta]:
        """Learn what a step sampled; results come in the order of the plans. `seconds` is how long it took;
        None if that could not be told apart: then it is part of the next step's."""
        oldest = next(iter(self._in_flight), None)
        if not oldest == plan.number == result.number:
            raise RuntimeError(f"step {oldest} is next to be applied, not {plan.number} with {result.number}")
        step = self._in_flight.pop(plan.number)
        self._totals.time(self._cost, step, seconds)
        step.check(result)
        failed = [] if step.heard else self._hearing.hear(step, result.relevance)
        failed += self._apologise(dict.fromkeys(step.unsound(result), UNSOUND))
        samples, looks = zip(result.tokens, result.logprobs, strict=True), iter(result.relevance)
        block_size = self._limits.block_size
        deltas = []
        for sequence, epoch, row in step.planned:
            sample = next(samples) if row.sample else None
            seen = next(looks) if row.relevance_targets else None
            if sequence.ended:
                continue  # stopped or cancelled meanwhile: the row was wasted
            if sample:  # also for one that gave way meanwhile: the token is its own, it goes on from there
                sequence.pending -= 1
                sequence.tokens.append(sample[0])
            if sequence.epoch == epoch:
                sequence.looking &= not step.brief
                # The end of a look may be computed again, to sample; all of a brief one is.
                whole = row.num_tokens - 1 if row.relevance_targets else row.num_tokens
                computed = row.start if step.brief else row.start + whole
                if sequence.pins or computed // block_size > sequence.sealed:
                    self._holdings.settle(sequence, computed)
            if sample:
                kept = self._holdings.named.kept(sequence.group)
                deltas.append(news(sequence, *sample, kept, self._clock))
                if deltas[-1].finish:
                    self._end(sequence)
            if seen is not None:
                failed += self._hearing.decide(sequence.group, seen)  # who ends with it
        self._totals.generated_tokens += len(deltas)
        return deltas + failed

    # Leaving

    def _give_way(self, sequence: Sequence) -> None:
        """Back to the queue, to go on when its rank is next: with what was set aside, or computed again. What
        its look decides counts when it comes, but nothing waits there for it."""
        self._holdings.swapping.set_aside(sequence)
        self._leave(sequence)
        self._queue(sequence)
        self._totals.gave_way(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._places.leave(sequence)
        self._holdings.drop(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._leave(sequence)
        self._holdings.swapping.space.drop(sequence.handle)
        group = sequence.group
        group.choices.remove(sequence)
        if not group.choices:
            del self._groups[group.request.id]
            self._pixel_bytes -= group.pixel_bytes
            self._totals.gone(group)
            self._holdings.gone(group)
        self._holdings.making.sweep()

    def end_lost(self) -> list[Delta]:
        """Requests end that rely on a named picture which is gone."""
        return self._apologise(dict.fromkeys(self._holdings.named.take_lost(), GONE), CODE)

    def _apologise(self, hit: Mapping[str, str], code: str | None = None) -> list[Delta]:
        """Requests end with an error, each told what it was."""
        return [one for name, why in hit.items() for one in self._end_request(name, "error", why, code)]

    def _end_request(
        self, request_id: str, finish: FinishReason, error: str | None = None, code: str | None = None
    ) -> list[Delta]:
        group = self._groups.get(request_id)
        ending = list(group.choices) if group else []
        for sequence in ending:
            self._end(sequence)
        return [last_news(one, finish, error, code) for one in ending]

    # How it stands

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no step in flight."""
        return not self._groups and not self._in_flight

    @property
    def short_of(self) -> str | None:
        """What the heads of the queues lacked in the step planned last: rows, memory, or time in the step."""
        return self._places.short_of

    @property
    def costs(self) -> Coefficients:
        return self._cost.coefficients

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._groups) - self._places.running_requests,
            oldest_wait=self._totals.oldest_wait(self._clock()),
            features=self._store.stats,
            step_error=self._cost.error,
            **self._places.counted(),
            **self._holdings.counted(),
            **self._totals.counted(),
        )

    def check(self) -> None:
        """Raise if any bookkeeping contradicts another; for tests and idle moments."""
        self._holdings.check(self._places.running, self._groups.values())
        self._holdings.making.check(key for step in self._in_flight.values() for key in step.views)
        everyone = {sequence for group in self._groups.values() for sequence in group.choices}
        faults = self._places.faults(everyone)
        if any(item.ended or item.pending > len(self._in_flight) for item in everyone):
            faults.append("a sequence waits for a token that is not on its way")
        faults += looking_faults(everyone, self._in_flight.values())
        if faults:
            raise RuntimeError("scheduler: " + "; ".join(faults))
