"""Whether a request fits at all, and which waiting sequences start in a step."""

from collections.abc import Callable, Iterable

from saccade.errors import ContextTooLong, InvalidValue, Overloaded
from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.kv_manager import KVManager
from saccade.scheduler.policy import PrefillBudget, SchedulerConfig, has_time
from saccade.scheduler.queues import Queues
from saccade.scheduler.sequence import RequestState, Sequence
from saccade.scheduler.stats import SchedulerStats
from saccade.scheduler.step_builder import StepBuilder


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        kv: KVManager,
        cost: CostModel,
        stats: SchedulerStats,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._queues = queues
        self._kv = kv
        self._cost = cost
        self._stats = stats
        self._clock = clock
        self._prefix_wait = PrefixWait(config, kv.prefix)

    def enqueue(self, sequence: Sequence) -> None:
        """Add to the queue of its class; the sequences of a request need its views once."""
        first = sequence.state.sequences[0]
        encoding = self._kv.prefetch_views(first) if sequence is first else first.encoding
        self._queues.add(sequence, encoding=encoding)

    def preempt(self, sequence: Sequence) -> None:
        """Back to its queue. It resumes with what was swapped out or cached, and computes the rest again."""
        self._kv.swap.swap_out(sequence)
        self.release(sequence)
        self.enqueue(sequence)
        self._stats.count_preemption(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take it out of its queue or slot, and free what it holds."""
        self._queues.remove(sequence)
        self._kv.free(sequence)

    def admit(self, step: StepBuilder, kind: bool, budget: PrefillBudget) -> None:
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
                reserved = sum(self._kv.num_growth_blocks(running) for running in queues.running)
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
        reserved = sum(self._kv.num_growth_blocks(running) for running in self._queues.running)
        fits = self._kv.share_prefix(head, reserved) is None
        if fits:
            self._kv.free(head)
        return fits

    def _can_start(self, sequence: Sequence) -> bool:
        """Whether it need not wait for its tokens, its views, or blocks that another sequence computes."""
        if self._prefix_wait.still_waits(sequence) or not self._kv.can_start(sequence):
            return False
        return sequence.prompt_donor() is not None or not self._prefix_wait.should_wait(sequence)

    def _may_start(self, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> bool:
        """Whether slots, the other class and the step's time permit it."""
        queues, kind, now = self._queues, sequence.encoding, self._clock()
        other = queues.waiting[not kind]
        if not queues.free_slots or (len(other) and queues.slots_used[kind] >= self._config.max_class_slots):
            return False
        if queues.starved[not kind] and len(other) and self._must_yield(sequence, other[0], now):
            return False
        alone = self._cost.predict(Work(rows=1, context=sequence.num_tokens))
        waited = now - sequence.state.arrival_time
        return has_time(budget, step.milliseconds, alone, waited, self._config)

    def _must_yield(self, sequence: Sequence, head: Sequence, now: float) -> bool:
        """Whether a waiting sequence must leave slots and memory to the head of the other queue, which lacks
        them, if that ranks before it and has waited long enough."""
        waited = now - head.state.arrival_time
        outranks = head.rank < sequence.rank and waited > self._config.patience
        return outranks and self._kv.competes(sequence, head, self._queues)

    def _start(self, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> bool:
        """Give a slot and first tokens to a sequence that shares its prefix; frees it if none fit."""
        swaps_only = sequence.host_blocks and step.planned  # its blocks are swapped in during this step
        tokens = 0 if swaps_only else size_chunk(self._kv, step, sequence, budget)
        if not tokens and not swaps_only:
            self._kv.free(sequence)
            return False
        self._queues.start(sequence)
        self._prefix_wait.add(sequence)
        step.start(sequence)
        self._stats.count_start(sequence, self._clock(), self._config.block_size)
        self._kv.copy_on_write(step, sequence)
        self._kv.swap_in(step, sequence)
        self._kv.allocate(sequence, sequence.num_reserved_tokens)
        if tokens:
            step.await_swaps |= bool(sequence.host_blocks)
            step.schedule(sequence, sequence.next_slice(tokens))
        return True


def size_chunk(kv: KVManager, step: StepBuilder, sequence: Sequence, budget: PrefillBudget) -> int:
    """Chunked prefill: how many tokens of a prompt this step computes, with their views cached or encoded."""
    tokens = min(sequence.remaining, step.tokens_left, budget.tokens)
    least, start = min(tokens, budget.least), sequence.num_computed_tokens
    tokens = step.fit_tokens(start, tokens, budget.until, least)
    must = budget.least > 0  # the first prompt of a class always advances
    ready = tokens
    if tokens and sequence.state.layout.spans:
        ready = kv.encoder.prepare_views(step, sequence, tokens, must=must)
    if step.encodes:  # they take time too
        ready = min(ready, step.fit_tokens(start, ready, budget.until, max(least, 1)))
    if ready:
        budget.tokens -= ready
        budget.least = 0
    return ready


def check_fits(
    state: RequestState, config: SchedulerConfig, kv: KVManager, num_waiting: int, pixel_bytes: int
) -> None:
    """Raise for a request that is invalid, can never fit, or finds the queue full. `pixel_bytes`: of the
    requests present."""
    sampling, prompt = state.request.sampling, state.request.max_length
    if prompt < 1:
        raise InvalidValue("the prompt is empty; it needs at least one token", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidValue(f"max_tokens is {sampling.max_tokens}; ask for at least 1", param="max_tokens")
    if sampling.n < 1:
        raise InvalidValue(f"n is {sampling.n}; ask for at least 1", param="n")
    if prompt >= config.max_model_len:
        visual = sum(span.view.tokens for span in state.layout.spans)
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, of which images take {visual}; the context holds "
            f"{config.max_model_len}, output included; shorten the prompt or use smaller images",
            param="prompt",
        )
    blocks = config.blocks_for(config.max_tokens_of(state.request) - 1)  # the last token is never computed
    if blocks > kv.pool.count:
        raise ContextTooLong(
            f"{prompt} prompt tokens and up to {sampling.max_tokens} output tokens need {blocks} KV blocks "
            f"of {config.block_size} tokens; the cache has {kv.pool.count}; shorten the prompt or lower "
            "max_tokens",
            param="max_tokens",
        )
    if kv.pool.has_vision_pool:
        vision = kv.vision_blocks(state).among(0, blocks)
        for name, needed, is_vision in (("text", blocks - vision, False), ("images", vision, True)):
            if needed > kv.pool.size(vision=is_vision):
                raise ContextTooLong(
                    f"the request needs {needed} KV blocks of {config.block_size} tokens for {name}; their "
                    f"pool has {kv.pool.size(vision=is_vision)}; shorten the prompt, lower max_tokens or use "
                    "smaller images",
                    param="prompt",
                )
    if num_waiting >= config.max_queue:
        raise Overloaded(
            f"{num_waiting} requests are waiting and the queue holds {config.max_queue}; try again later"
        )
    if pixel_bytes and pixel_bytes + state.pixel_bytes > config.max_queue_bytes:
        raise Overloaded(
            f"images of {pixel_bytes} bytes are waiting or being answered, and {config.max_queue_bytes} may "
            "be at a time; try again later"
        )


class PrefixWait:
    """Blocks that running sequences are computing, which a waiting sequence with the same prefix should wait
    for. A block can be shared once the output of its step has arrived: of several questions about one image
    that arrive together, the first computes the image."""

    def __init__(self, config: SchedulerConfig, prefix: PrefixCache | None) -> None:
        self._least = config.blocks_for(config.wait_tokens)
        self._prefix = prefix
        self._keys: set[bytes] = set()

    def begin_step(self, running: Iterable[Sequence]) -> None:
        self._keys = set()
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """One more runs, from this step on."""
        if self._prefix is not None and sequence.chain is not None:
            for key in reversed(sequence.chain.keys[sequence.num_cached_blocks :]):
                if self._prefix.contains(key):
                    break  # and all before it
                self._keys.add(key)

    def still_waits(self, sequence: Sequence) -> bool:
        """Whether the block it waits for is still being computed; cheap, for every waiting sequence."""
        return sequence.awaited_block in self._keys

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether enough of what it needs next is being computed; notes the block to wait for."""
        if not self._keys or self._prefix is None or sequence.chain is None:
            return False
        chain = sequence.chain
        chain.extend(sequence.tokens)
        first = stop = len(self._prefix.match(chain))
        while stop < len(chain.keys) and chain.keys[stop] in self._keys:
            stop += 1
        if stop - first < self._least:
            return False
        sequence.awaited_block = chain.keys[stop - self._least]
        return True
