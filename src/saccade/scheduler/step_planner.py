"""Fills a step: decode running sequences first, then prefill running prompts, then admit waiting ones."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Protocol

from saccade.scheduler.cost_model import Work
from saccade.scheduler.kv_manager import KVManager
from saccade.scheduler.policy import ArrivalRate, PrefillBudget, SchedulerConfig, prefill_budgets
from saccade.scheduler.queues import PrefixWait, Queues, choose_preemption_victim
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.stats import SchedulerStats
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
        stats: SchedulerStats,
        clock: Callable[[], float],
        drafter: Drafter | None,
    ) -> None:
        self._config = config
        self._queues = queues
        self._kv = kv
        self._stats = stats
        self._clock = clock
        self._drafter = drafter
        self._prefix_wait = PrefixWait(config, kv.prefix)
        self.arrivals = ArrivalRate()

    def fill(self, step: StepBuilder, number: int) -> None:
        decodes: list[Sequence] = []
        prefills: Prefills = ([], [])
        for sequence in self._queues.running:
            remaining = sequence.remaining
            if remaining == 1 and sequence.num_computed_tokens >= sequence.prompt_length:
                decodes.append(sequence)
            elif remaining:
                prefills[sequence.encoding].append(sequence)
        self._schedule_decodes(step, decodes, reserve=1 if any(prefills) else 0)
        self._set_time_limits(step, prefills)
        self._schedule_prefills(step, prefills, number)

    # Queues

    def enqueue(self, sequence: Sequence) -> None:
        """Add to the queue of its class; the sequences of a request need its views once."""
        first = sequence.state.sequences[0]
        sequence.encoding = self._kv.prefetch_views(first) if sequence is first else first.encoding
        self._queues.waiting[sequence.encoding].add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back to its queue. It resumes with what was swapped out or cached, and computes the rest again."""
        self._kv.swap.swap_out(sequence)
        self.release(sequence)
        self.enqueue(sequence)
        sequence.state.num_preemptions += 1
        self._stats.preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """Take it out of its queue or slot, and free what it holds."""
        self._queues.remove(sequence)
        self._kv.free(sequence)

    # Decodes

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
            self.preempt(victim)
        self._kv.allocate(sequence, stop)
        return True

    # Prefills

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
                tokens = 0 if preempted else self._size_chunk(step, sequence, budgets[kind])
                if tokens:
                    step.schedule(sequence, sequence.next_slice(tokens))
            if self._queues.waiting[kind]:
                self._admit(step, kind, budgets[kind])

    def _size_chunk(self, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> int:
        """Chunked prefill: how many tokens of a prompt this step computes, with their views cached or
        encoded."""
        tokens = min(sequence.remaining, step.tokens_left, budget.tokens)
        least, start = min(tokens, budget.least), sequence.num_computed_tokens
        ready = tokens = step.fit_tokens(start, tokens, budget.until, least)
        if tokens and sequence.state.layout.spans:
            must = budget.least > 0  # the first prompt of a class always advances
            ready = self._kv.encoder.prepare_views(step, sequence, tokens, must=must)
        if step.encodes:  # they take time too
            ready = min(ready, step.fit_tokens(start, ready, budget.until, max(least, 1)))
        if ready:
            budget.tokens -= ready
            budget.least = 0
        return ready

    # Admission

    def _admit(self, step: StepBuilder, kind: bool, budget: PrefillBudget) -> None:
        """Start waiting sequences of a class in order, up to the first that does not fit. If that lacks only
        vision blocks, text behind it may start, up to the first that would take what it needs."""
        queues = self._queues
        self._prefix_wait.begin_step(queues.running)
        queue = queues.waiting[kind]
        if queues.starved[kind] and not (step.tokens_left and budget.tokens):
            queues.starved[kind] = not self._would_fit(queue[0])
        reserved: int | None = None
        skipped: Sequence | None = None  # it lacks vision blocks
        index = 0
        while index < len(queue) and step.tokens_left and budget.tokens:
            sequence = queue[index]
            if (skipped and sequence.state.layout.spans) or not self._can_start(sequence):
                index += 1
                continue
            if skipped and self._kv.competes(sequence, skipped, queues):
                return
            if not kind and not sequence.prompt_donor() and self._kv.must_encode(sequence):
                queue.remove(sequence)  # its features were evicted meanwhile
                self.enqueue(sequence)
                continue
            queues.starved[kind] = skipped is not None or not queues.free_slots
            if not self._may_start(step, sequence, budget):
                return
            if reserved is None:
                reserved = sum(map(self._kv.num_growth_blocks, queues.running))
            shortage = self._kv.share_prefix(sequence, reserved)
            if shortage is None:
                if not self._start(step, sequence, budget):
                    return
                reserved += self._kv.num_growth_blocks(sequence)
                continue
            queues.starved[kind] = True
            if skipped or shortage.text:
                return
            skipped, index = sequence, index + 1

    def _would_fit(self, head: Sequence) -> bool:
        """Whether a head that lacked slots or memory would start now if the step had tokens for it."""
        if not self._queues.free_slots or not self._can_start(head):
            return False
        reserved = sum(map(self._kv.num_growth_blocks, self._queues.running))
        fits = self._kv.share_prefix(head, reserved) is None
        if fits:
            self._kv.free(head)
        return fits

    def _can_start(self, sequence: Sequence) -> bool:
        """Whether it need not wait for its tokens, its views, or blocks that another sequence computes. The
        first sequence of a request computes the prompt for all."""
        if sequence.pending or self._prefix_wait.still_waits(sequence):
            return False
        has_donor = sequence.prompt_donor() is not None
        if not has_donor and sequence is not sequence.state.sequences[0]:
            return False
        cache = self._kv.encoder.cache
        spans = sequence.state.layout.spans
        if any(cache.is_fetching(span.key) and not cache.is_ready(span.key) for span in spans):
            return False
        return has_donor or not self._prefix_wait.should_wait(sequence)

    def _may_start(self, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> bool:
        """Whether slots, the other class and the step's time permit it. The batch does not grow beyond the
        target unless the sequence has waited long, or even a single stream would miss the target."""
        config, queues, kind, now = self._config, self._queues, sequence.encoding, self._clock()
        other = queues.waiting[not kind]
        if not queues.free_slots or (other and queues.slots_used[kind] >= config.max_class_slots):
            return False
        if other and queues.starved[not kind] and self._must_yield(sequence, other[0], now):
            return False
        if budget.until is None or step.milliseconds < budget.until:
            return True
        alone = step.cost.predict(Work(rows=1, context=sequence.num_tokens))
        waited = now - sequence.state.arrival_time
        return budget.least > 0 and (alone > (config.step_target or 0.0) or waited > config.patience)

    def _must_yield(self, sequence: Sequence, head: Sequence, now: float) -> bool:
        """Whether a waiting sequence must leave slots and memory to the head of the other queue, which lacks
        them, if that ranks before it and has waited long enough."""
        waited = now - head.state.arrival_time
        outranks = head.rank < sequence.rank and waited > self._config.patience
        return outranks and self._kv.competes(sequence, head, self._queues)

    def _start(self, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> bool:
        """Give a slot and first tokens to a sequence that shares its prefix; frees it if none fit."""
        swaps_only = sequence.host_blocks and step.planned  # its blocks are swapped in during this step
        tokens = 0 if swaps_only else self._size_chunk(step, sequence, budget)
        if not tokens and not swaps_only:
            self._kv.free(sequence)
            return False
        self._queues.start(sequence)
        self._prefix_wait.add(sequence)
        step.start(sequence)
        self._stats.count_start(sequence, self._clock(), self._config.block_size)
        self._kv.copy_on_write(step, sequence)
        if sequence.swapped:
            self._kv.swap_in(step, sequence)
        self._kv.allocate(sequence, sequence.num_reserved_tokens)
        if tokens:
            step.await_swaps |= bool(sequence.host_blocks)
            step.schedule(sequence, sequence.next_slice(tokens))
        return True
