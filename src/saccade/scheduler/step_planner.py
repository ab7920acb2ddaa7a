"""Fills a step: decode running sequences first, then prefill running prompts, then admit waiting ones."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Protocol

from saccade.scheduler.admission import Admission, size_chunk
from saccade.scheduler.kv_manager import KVManager
from saccade.scheduler.policy import ArrivalRate, SchedulerConfig, prefill_budgets
from saccade.scheduler.queues import Queues, choose_preemption_victim
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.step_builder import StepBuilder

CLASSES = (False, True)  # sequences without, and with views to encode
Prefills = tuple[list[Sequence], list[Sequence]]  # by class


class Drafter(Protocol):
    def propose(self, tokens: Ordered[int], most: int) -> tuple[int, ...]:
        """Up to `most` likely next tokens of a sequence, for the device to verify."""


class StepPlanner:
    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        kv: KVManager,
        admission: Admission,
        clock: Callable[[], float],
        drafter: Drafter | None,
    ) -> None:
        self._config = config
        self._queues = queues
        self._kv = kv
        self._admission = admission
        self._clock = clock
        self._drafter = drafter
        self.arrivals = ArrivalRate()

    def fill(self, step: StepBuilder, number: int) -> None:
        decodes, prefills = self._split_running()
        self._schedule_decodes(step, decodes, reserve=1 if any(prefills) else 0)
        self._set_time_limits(step, prefills)
        self._schedule_prefills(step, prefills, number)

    def _split_running(self) -> tuple[list[Sequence], Prefills]:
        decodes: list[Sequence] = []
        prefills: Prefills = ([], [])
        for sequence in self._queues.running:
            remaining = sequence.remaining
            if remaining == 1 and sequence.num_computed_tokens >= sequence.prompt_length:
                decodes.append(sequence)
            elif remaining:
                prefills[sequence.encoding].append(sequence)
        return decodes, prefills

    def _schedule_decodes(self, step: StepBuilder, decodes: list[Sequence], *, reserve: int) -> None:
        """The next token of every running answer, in order of rank; `reserve` tokens are left to prompts."""
        block_size = self._config.block_size
        for sequence in decodes:
            if step.tokens_left <= reserve:
                break
            if sequence.slot is None:
                continue  # preempted by an earlier one
            if len(sequence.blocks) * block_size > sequence.num_computed_tokens or self._make_room(sequence):
                drafts = self._draft(sequence, step.tokens_left - reserve) if self._drafter else ()
                step.schedule(sequence, sequence.draft_slice(drafts) if drafts else sequence.next_slice(1))

    def _draft(self, sequence: Sequence, tokens_left: int) -> tuple[int, ...]:
        """Drafts that fit the step, the sequence and the free blocks, without preempting. The last token must
        be known, so a sequence with a step in flight is not drafted."""
        most = min(tokens_left, sequence.max_tokens - sequence.num_tokens) - 1
        if self._drafter is None or sequence.pending or sequence.state.decision is not None or most < 1:
            return ()
        drafts = self._drafter.propose(sequence.tokens, most)[:most]
        stop = sequence.num_computed_tokens + 1 + len(drafts)
        if not drafts or self._kv.num_missing_blocks(sequence, stop):
            return ()
        self._kv.allocate(sequence, stop)
        return drafts

    def _make_room(self, sequence: Sequence) -> bool:
        """Allocate a block for its next token, preempting sequences behind it if necessary. The last of all
        waits with what it holds. A victim is not in this step yet: decodes are scheduled in order of rank,
        prompts after them."""
        stop = sequence.num_computed_tokens + 1
        while self._kv.num_missing_blocks(sequence, stop):
            victim = choose_preemption_victim(self._queues.running, sequence, self._kv.can_free)
            if victim is sequence:
                return False
            self._admission.preempt(victim)
        self._kv.allocate(sequence, stop)
        return True

    def _set_time_limits(self, step: StepBuilder, prefills: Prefills) -> None:
        """With streams the step has a target; without, only image prefill is limited."""
        streams = bool(step.planned)
        if streams and self._config.step_target is None:
            return
        now = self._clock()
        waited = self._queues.longest_wait(prefills, now)
        if streams:
            step.target = self._config.step_target_after(waited)
            step.protects_text = self._config.protects_text(self.arrivals.share, waited)
            step.tokens_left = min(step.tokens_left, self._config.stream_tokens)
        else:
            rate = self.arrivals.per_second(now)
            step.image_prefill_ms = self._config.image_prefill_limit(rate, step.milliseconds, waited)

    def _schedule_prefills(self, step: StepBuilder, prefills: Prefills, number: int) -> None:
        """Within the budget of each class: running prompts, then waiting ones."""
        queues = self._queues
        both = all(
            prefills[kind] or (queues.waiting[kind] and queues.free_slots and not queues.starved[kind])
            for kind in CLASSES
        )
        self._schedule_classes(step, prefills, number, both=both)
        if both and not step.planned:  # a class could not use its share
            self._schedule_classes(step, prefills, number, both=False)
        if step.target is not None:
            self.arrivals.record_step(prefills_text=any(not one.encoding for one, _, _ in step.longer))

    def _schedule_classes(self, step: StepBuilder, prefills: Prefills, number: int, *, both: bool) -> None:
        now = step.milliseconds if step.target is not None else 0.0
        budgets = prefill_budgets(self._config, step.tokens_left, now, step.target, both=both, turn=number)
        for kind in CLASSES:
            if kind and step.image_prefill_ms is not None:
                budgets[kind].until = step.milliseconds + step.image_prefill_ms
            elif kind and step.longer and step.protects_text:
                budgets[kind].until = step.encode_until = step.milliseconds
            for sequence in prefills[kind]:
                preempted = sequence.slot is None
                tokens = 0 if preempted else size_chunk(self._kv, step, sequence, budgets[kind])
                if tokens:
                    step.schedule(sequence, sequence.next_slice(tokens))
            if self._queues.waiting[kind]:
                self._admission.admit(step, kind, budgets[kind])
