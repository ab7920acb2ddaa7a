"""Whether a preempted sequence swaps its KV to host memory, and what it resumes with.

Swapping pays if copying the blocks out and in takes less time than computing their tokens again, with views
whose features are gone. A sequence resumes with what the prefix cache has of its beginning and the host
blocks that follow; it computes the rest.
"""

from saccade.encoder.cache.store import EncoderCache
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.swap_space import SwapSpace
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.step_builder import StepBuilder


class SwapPolicy:
    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        store: EncoderCache[object],
        cost: CostModel,
        space: SwapSpace | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._store = store
        self._cost = cost
        self.space = space if space is not None else SwapSpace(0)

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the computed blocks of a sequence that is being preempted to the host, if that pays."""
        if not self.space.count or not sequence.remaining or not self._pays(sequence):
            return  # with nothing remaining its last tokens are awaited: it may be finished
        held = sequence.blocks[: self._config.blocks_for(sequence.num_computed_tokens)]
        known = next((at for at, block in enumerate(held) if not self._pool.is_cached(block)), len(held))
        keys = sequence.chain.keys[:known] if sequence.chain is not None else ()
        sequence.swapped = True
        self.space.swap_out(sequence.seq_id, sequence.rank, sequence.num_computed_tokens, keys, held[known:])

    def _pays(self, sequence: Sequence) -> bool:
        """Whether copying out and in takes less time than recomputing. Shared blocks do not count: they stay
        on the device while others hold them."""
        size, blocks = self._config.block_size, sequence.blocks
        stop = self._config.blocks_for(sequence.num_computed_tokens)
        first = next((at for at in range(stop) if self._pool.ref_count(blocks[at]) == 1), stop)
        start = first * size
        if start >= sequence.num_computed_tokens:
            return False
        work = Work()
        work.add_row(start, sequence.num_computed_tokens - start)
        for span in sequence.spans(start, sequence.num_computed_tokens):
            if not self._store.is_expected(span.key):
                work.add_view(span.view.grid[0] * span.view.grid[1])
        again = self._cost.predict(work) - self._cost.predict(Work())
        return (stop - first) * self.space.milliseconds < again

    def find(self, sequence: Sequence, start: int) -> tuple[list[int], int]:
        """The host blocks that follow its block `start`, and how many of its tokens are computed with them;
        its last token is always computed on the device."""
        slots, computed = self.space.find(sequence.seq_id, start, self._config.block_size)
        computed = min(computed, sequence.num_tokens - 1)
        return slots[: max(self._config.blocks_for(computed) - start, 0)], computed

    def take(self, sequence: Sequence) -> tuple[int, ...]:
        """The host blocks found for it. The space does not overwrite them before the step is sent."""
        if sequence.host_blocks:
            self.space.swap_in(sequence.seq_id, sequence.host_blocks)
        else:
            self.space.drop(sequence.seq_id)
        return sequence.host_blocks

    def finish_plan(self, step: StepBuilder) -> None:
        """The step does the copies due; the sequences it swaps in have their blocks from then on."""
        step.swap_outs = self.space.take_copies()
        for sequence in step.arriving:
            sequence.host_blocks = ()
