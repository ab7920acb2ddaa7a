"""Who gets in: the waiting sequences of a class, in order, as long as they fit.

takes   a step in the making, and what one class may add to it
gives   rows, blocks and first tokens to those who enter
owns    nothing; it moves sequences between places, and has holdings take what they need
never   lets anybody pass a sequence that waits for what they would take
"""

from collections.abc import Callable
from functools import partial

from saccade.scheduler import policy
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.policy import Allowance, Limits
from saccade.scheduler.prefix_wait import Coming
from saccade.scheduler.queues import Places
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.stats import Totals
from saccade.scheduler.step_builder import Step


class Admission:
    def __init__(
        self,
        limits: Limits,
        places: Places,
        holdings: Holdings,
        coming: Coming,
        cost: CostModel,
        totals: Totals,
        clock: Callable[[], float],
        queue: Callable[[Sequence], None],
    ) -> None:
        """`queue` puts a sequence into the line of its class, as things stand."""
        self._limits = limits
        self._places = places
        self._holdings = holdings
        self._coming = coming
        self._cost = cost
        self._totals = totals
        self._clock = clock
        self._queue = queue

    def admit(self, step: Step, kind: bool, allowance: Allowance) -> None:
        """The waiting sequences of a class in order, up to the first that does not fit. If all that one lacks
        is blocks of the vision pool, text behind it goes on up to the first that would take what it needs."""
        places = self._places
        self._coming.see(places.running)
        line = places.waiting[kind]
        if places.starved[kind] and not (step.tokens_left and allowance.tokens):
            places.starved[kind] = not self._would_fit(line[0])
        owed: int | None = None
        passed: Sequence | None = None  # it lacks blocks of the vision pool
        place = 0
        while place < len(line) and step.tokens_left and allowance.tokens:
            sequence = line[place]
            if (passed and sequence.group.layout.spans) or not self._may_begin(sequence):
                place += 1
                continue
            if passed and self._holdings.competes(sequence, passed, rows=len(places.free_rows)):
                return
            if not kind and not sequence.donor() and self._holdings.must_encode(sequence):
                line.leave(sequence)  # its features were given up meanwhile
                self._queue(sequence)
                continue
            places.starved[kind] = passed is not None or not places.free_rows
            if not self._may_try(step, sequence, allowance):
                return
            if owed is None:
                owed = sum(self._holdings.owes(running) for running in places.running)
            lack = self._holdings.begin(sequence, owed)
            if lack is None:
                if not self._enter(step, sequence, allowance):
                    return
                owed += self._holdings.owes(sequence)
                continue
            places.starved[kind] = True
            if passed or lack.text:
                return
            passed, place = sequence, place + 1

    def _would_fit(self, head: Sequence) -> bool:
        """Whether a head that lacked rows or memory has enough by now, though the step has no tokens for it:
        its class has no share in steps before that is known."""
        if not self._places.free_rows or not self._may_begin(head):
            return False
        owed = sum(self._holdings.owes(running) for running in self._places.running)
        fits = self._holdings.begin(head, owed) is None
        if fits:
            self._holdings.drop(head)
        return fits

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether nothing is gained by waiting: for its tokens, its views, or what another one computes."""
        if self._coming.still(sequence) or not self._holdings.may_begin(sequence):
            return False
        return sequence.donor() is not None or not self._coming.awaited(sequence)

    def _may_try(self, step: Step, sequence: Sequence, allowance: Allowance) -> bool:
        """Whether rows, the other class and the step's time leave it a place."""
        places, kind, now = self._places, sequence.encoding, self._clock()
        other, free = places.waiting[not kind], len(places.free_rows)
        competes = partial(self._holdings.competes, sequence, rows=free)
        held_back = places.starved[not kind] and policy.held_back(
            sequence, other, now, self._limits.patience, competes
        )
        if not free or held_back or (len(other) and places.rows_of[kind] >= self._limits.most_class_rows):
            return False
        alone = self._cost.predict(Work(rows=1, context=sequence.length))
        waited = now - sequence.group.since
        return policy.has_time(allowance, step.milliseconds, alone, waited, self._limits)

    def _enter(self, step: Step, sequence: Sequence, allowance: Allowance) -> bool:
        """A row and first tokens for a sequence that has begun; False, and it has not, if they do not fit."""
        beside = sequence.host and step.planned  # its blocks come back while this step runs
        tokens = 0 if beside else self._holdings.portion(step, sequence, allowance)
        if not tokens and not beside:
            self._holdings.drop(sequence)
            return False
        self._places.enter(sequence)
        self._coming.enters(sequence)
        step.let_in(sequence)
        self._totals.start(sequence, self._clock(), self._limits.block_size)
        self._holdings.copy_on_write(step, sequence)
        self._holdings.bring_back(step, sequence)
        self._holdings.extend(sequence, sequence.claim)
        if tokens:
            step.await_swaps |= bool(sequence.host)
            step.run(sequence, sequence.next_row(tokens))
        return True
