"""Whether a sequence that gives way sets its KV aside in host memory, and what it comes back with.

takes   sequences as they leave their row, and as they come back
gives   tickets to the swap space, blocks to be filled from it to the step
owns    the swap space
never   decides who gives way, or when somebody comes back

Setting aside is worth it if copying the blocks out and in takes less time than computing their tokens again
would add to a step, views included whose features are gone. Both are estimates: the rate of the link is
measured once, the step is the cost model's. A sequence comes back with what the prefix cache has of its
beginning and the slots that go on from there; where they end it computes.
"""

from saccade.encoder.cache.store import EncoderCache
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.swap_space import SwapSpace
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.step_builder import Step


class Swapping:
    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        store: EncoderCache[object],
        cost: CostModel,
        space: SwapSpace | None,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._store = store
        self._cost = cost
        self.space = space if space is not None else SwapSpace(0)

    # Leaving

    def set_aside(self, sequence: Sequence) -> None:
        """It gives way, and still holds everything: its computed blocks go to the host if that pays."""
        if not self.space.count or not sequence.remaining or not self._pays(sequence):
            return  # with nothing remaining its last token is on the way: it does not come back
        held = sequence.blocks[: self._limits.blocks_for(sequence.computed)]
        known = next((at for at, block in enumerate(held) if not self._pool.is_cached(block)), len(held))
        keys = sequence.chain.keys[:known] if sequence.chain is not None else ()
        self.space.swap_out(sequence.handle, sequence.rank, sequence.computed, keys, held[known:])

    def _pays(self, sequence: Sequence) -> bool:
        """What others hold too counts for nothing: it stays on the device as long as they do."""
        size, blocks = self._limits.block_size, sequence.blocks
        stop = self._limits.blocks_for(sequence.computed)
        first = next((at for at in range(stop) if self._pool.ref_count(blocks[at]) == 1), stop)
        start = first * size
        if start >= sequence.computed:
            return False
        work = Work()
        work.add_row(start, sequence.computed - start)
        for span in sequence.spans(start, sequence.computed):
            if not self._store.is_expected(span.key):
                work.add_view(span.view.grid[0] * span.view.grid[1])
        again = self._cost.predict(work) - self._cost.predict(Work())
        return (stop - first) * self.space.milliseconds < again

    # Coming back

    def find(self, sequence: Sequence, start: int) -> tuple[list[int], int]:
        """The slots that go on from its block `start`, and how many of its tokens are computed with them; its
        last token is computed in any case."""
        slots, computed = self.space.find(sequence.handle, start, self._limits.block_size)
        computed = min(computed, sequence.length - 1)
        return slots[: max(self._limits.blocks_for(computed) - start, 0)], computed

    def redeem(self, sequence: Sequence) -> tuple[int, ...]:
        """The slots it was promised; its ticket is used up or worthless. They are not written before the step
        is sent off, whatever blocks are taken until then."""
        if sequence.host:
            self.space.swap_in(sequence.handle, sequence.host)
        else:
            self.space.drop(sequence.handle)
        return sequence.host

    def sent(self, step: Step) -> None:
        """The step goes off with what there is to copy; whoever returns with it has its blocks behind it."""
        step.swap_outs = self.space.take_copies()
        for sequence in step.arriving:
            sequence.host = ()
