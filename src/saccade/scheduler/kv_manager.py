"""KV blocks of sequences: allocation, sharing through the prefix cache, copy-on-write, swap.

The device runs steps in the order of their plans, and a plan is launched before the scheduler is called
again. So `num_computed_tokens` counts planned steps: what a later plan reads is written by then. For the same
reason a block can be released while a step in flight still writes to it: the next owner writes later. Only
caching a block for others waits for the step's output, because its tokens are known only then.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.pool_sizing import VisionBlocks
from saccade.kv_cache.prefix_cache import PinnedPrefixes, PrefixCache, match_groups
from saccade.kv_cache.swap_space import SwapSpace
from saccade.request import Request
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.queues import Queues
from saccade.scheduler.sequence import RequestState, Sequence, pixels_by_view
from saccade.scheduler.step_builder import StepBuilder
from saccade.scheduler.swap_policy import SwapPolicy
from saccade.step_plan import PromptLayout, Span


class Caches(NamedTuple):
    """The memory that the scheduler allocates from."""

    pool: BlockPool
    prefix: PrefixCache | None
    encoder: EncoderCache[Any]
    partial_views: PartialViews[Any] | None = None
    swap_space: SwapSpace | None = None


class HeadStart(NamedTuple):
    blocks: list[int]  # on the device, to be shared; the last one may hold only some of its tokens
    num_computed_tokens: int  # with those blocks and what is swapped in
    host_blocks: tuple[int, ...] = ()  # that follow those blocks


class Shortage(NamedTuple):
    """Blocks missing in each pool."""

    text: int
    vision: int


class KVManager:
    def __init__(self, config: SchedulerConfig, caches: Caches, cost: CostModel) -> None:
        self._config = config
        self._block_size = config.block_size
        self.pool = caches.pool
        self.prefix = caches.prefix
        self._encoder_cache = caches.encoder
        self.encoder = EncoderScheduler(config, caches.encoder, caches.partial_views)
        self.swap = SwapPolicy(config, caches.pool, caches.encoder, cost, caches.swap_space)
        if self.prefix is not None:
            self.prefix.on_evict = self.swap.space.save_evicted

    # How much there is

    def num_missing_blocks(self, sequence: Sequence, stop: int) -> int:
        """Blocks missing in the pools for the sequence to be computed up to `stop`."""
        text, vision = self._needed_blocks(sequence, stop)
        left = self.pool.num_available
        return max(text - left(), 0) + max(vision - left(vision=True), 0)

    def _needed_blocks(self, sequence: Sequence, stop: int) -> tuple[int, int]:
        """Blocks it does not have yet of its tokens up to `stop`: of the text pool and of the vision pool."""
        have, wanted = len(sequence.blocks), self._config.blocks_for(stop)
        vision = self.vision_blocks(sequence.state).among(have, wanted) if self.pool.has_vision_pool else 0
        return max(wanted - have, 0) - vision, vision

    def vision_blocks(self, state: RequestState) -> VisionBlocks:
        """Which blocks of its sequences are in the vision pool."""
        if state.vision_blocks is None:
            state.vision_blocks = VisionBlocks(state.layout.spans, self._block_size, self.pool.roles)
        return state.vision_blocks

    def can_free(self, sequence: Sequence) -> bool:
        """Whether preempting the sequence may free a block for text."""
        pool = self.pool
        return not pool.has_vision_pool or not all(map(pool.in_vision, sequence.blocks))

    def competes(self, sequence: Sequence, head: Sequence, queues: Queues) -> bool:
        """Whether starting `sequence` could take what `head` waits for. With two pools it does not if the
        head waits for vision blocks, the sequence needs none, and a slot and text blocks are left for the
        head, beside those that the sequence and the running ones grow by."""
        if not self.pool.has_vision_pool or len(queues.free_slots) < 2:
            return True
        text, vision = self._needed_blocks(sequence, sequence.num_reserved_tokens)
        text = max(text, self.num_growth_blocks(sequence))
        head_text, _ = self._needed_blocks(head, head.num_reserved_tokens)
        reserved = sum(map(self.num_growth_blocks, queues.running))
        return bool(vision) or text + head_text + reserved > self.pool.num_available()

    def num_growth_blocks(self, sequence: Sequence) -> int:
        """Blocks that a running sequence needs for its next block's worth of output."""
        soon = min(sequence.num_tokens + self._block_size, sequence.max_tokens - 1)
        return max(self._config.blocks_for(soon) - len(sequence.blocks), 0)

    # Views of waiting sequences

    def must_encode(self, sequence: Sequence) -> bool:
        """Whether a view is neither in the encoder cache nor covered by the prefix cache."""
        return not all(self._encoder_cache.is_expected(span.key) for span in self.uncached_views(sequence))

    def uncached_views(self, sequence: Sequence) -> Ordered[Span]:
        """Its views that the prefix cache does not cover."""
        if not sequence.state.layout.spans:
            return ()
        return sequence.spans(self._head_start(sequence).num_computed_tokens, sequence.prompt_length)

    def prefetch_views(self, sequence: Sequence) -> bool:
        """Begin to read views that are on disk; gives whether others must be encoded."""
        uncached = self.uncached_views(sequence)
        for span in uncached:
            self._encoder_cache.prefetch(span.key)
        return not all(self._encoder_cache.is_expected(span.key) for span in uncached)

    def poll(self) -> None:
        """Take over what threads and other servers did with the encoder cache since the last step."""
        for content in self._encoder_cache.poll():
            self._hide_image(content)

    def delete_image(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """`then` is called when its files are deleted too."""
        self._encoder_cache.delete_image(content, then)
        self._hide_image(content)

    def _hide_image(self, content: bytes) -> None:
        self.encoder.delete_image(content)
        if self.prefix is not None:
            self.prefix.image_versions.delete(content)

    # Starting

    def share_prefix(self, sequence: Sequence, reserved: int) -> Shortage | None:
        """Share the blocks that already hold its beginning, if the rest fits too beside the `reserved` blocks
        of others; otherwise change nothing, and give what is missing."""
        head = self._head_start(sequence)
        shortage = self._share(sequence, head, reserved)
        # Without the last partial block, whose copy needs a block beside the original, it may fit.
        whole = head.num_computed_tokens // self._block_size
        if shortage is None or len(head.blocks) == whole:
            return shortage
        return self._share(sequence, HeadStart(head.blocks[:whole], whole * self._block_size), reserved)

    def _head_start(self, sequence: Sequence) -> HeadStart:
        """What need not be computed. The last token always is, to sample from."""
        blocks, shared = self._match_prefix(sequence)
        donor = sequence.prompt_donor()
        if donor is not None and donor.prompt_length > shared:
            blocks, shared = donor.blocks, donor.prompt_length
        computed = min(shared, sequence.num_tokens - 1)
        whole = computed // self._block_size
        if sequence.swapped:
            host_blocks, restored = self.swap.find(sequence, whole)
            if host_blocks and restored > computed:
                return HeadStart(blocks[:whole], restored, tuple(host_blocks))
        return HeadStart(blocks[: self._config.blocks_for(computed)], computed)

    def _match_prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """Cached blocks that hold its beginning, and how many of its tokens; the last may be partial."""
        prefix, chain = self.prefix, sequence.chain
        if prefix is None or chain is None:
            return [], 0
        version = prefix.version, len(sequence.tokens)  # it is asked three times per start
        if sequence.prefix_match is not None and sequence.prefix_match[0] == version:
            return sequence.prefix_match[1]
        chain.extend(sequence.tokens)
        (blocks,) = match_groups((prefix,), chain)
        shared = len(blocks) * self._block_size
        part = prefix.match_partial(chain, len(blocks), sequence.tokens)
        if part and self.pool.has_vision_pool:  # the other pool's blocks may have another precision
            alike = self.pool.in_vision(part.block) == (len(blocks) in self.vision_blocks(sequence.state))
            part = part if alike else None
        if part:
            blocks, shared = [*blocks, part.block], shared + part.tokens
        sequence.prefix_match = version, (blocks, shared)
        return blocks, shared

    def _share(self, sequence: Sequence, head: HeadStart, reserved: int) -> Shortage | None:
        blocks = head.blocks
        for block in blocks:
            self.pool.acquire(block)
        sequence.blocks, sequence.host_blocks = list(blocks), head.host_blocks
        sequence.num_computed_tokens = head.num_computed_tokens
        sequence.dirty_blocks = list(range(len(blocks)))
        text, vision = self._needed_blocks(sequence, sequence.num_reserved_tokens)
        if len(blocks) > head.num_computed_tokens // self._block_size:  # the last block will be copied
            copied = self.pool.in_vision(blocks[-1])
            text, vision = text + (not copied), vision + copied
        left = self.pool.num_available
        shortage = Shortage(max(text - left() + reserved, 0), max(vision - left(vision=True), 0))
        if not any(shortage):
            return None
        self.free(sequence)
        return shortage

    def copy_on_write(self, step: StepBuilder, sequence: Sequence) -> None:
        """If its next token falls into a shared block, give the sequence a copy of that block. The original
        stays held until the step is planned, so that no copy's source is another copy's target."""
        index = sequence.num_computed_tokens // self._block_size
        if index < len(sequence.blocks):
            copy = self.pool.allocate(vision=self.pool.in_vision(sequence.blocks[index]))
            step.block_copies.append((sequence.blocks[index], copy))
            sequence.blocks[index] = copy

    def swap_in(self, step: StepBuilder, sequence: Sequence) -> None:
        """Have the step fill the blocks that were found in host memory, for a sequence swapped out before."""
        first, host_blocks = len(sequence.blocks), self.swap.take(sequence)
        self.allocate(sequence, (first + len(host_blocks)) * self._block_size if host_blocks else 0)
        step.swap_ins += zip(host_blocks, sequence.blocks[first:], strict=True)

    # Running

    def allocate(self, sequence: Sequence, stop: int) -> None:
        """Allocate the blocks the sequence needs to be computed up to `stop`."""
        while len(sequence.blocks) * self._block_size < stop:
            index = len(sequence.blocks)
            sequence.dirty_blocks.append(index)
            vision = self.pool.has_vision_pool and index in self.vision_blocks(sequence.state)
            sequence.blocks.append(self.pool.allocate(vision=vision))

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks behind its tokens, reserved for a longer prompt or for drafts."""
        while len(sequence.blocks) > self._config.blocks_for(sequence.num_tokens):
            self.pool.release(sequence.blocks.pop())
        sequence.dirty_blocks = [index for index in sequence.dirty_blocks if index < len(sequence.blocks)]

    def replace_prompt(self, state: RequestState, request: Request, layout: PromptLayout) -> None:
        """A host decision is made: the prompt may continue beyond what is computed."""
        self.encoder.remove(state)
        state.decision = None
        state.request, state.layout, state.vision_blocks = request, layout, None
        state.pixels = pixels_by_view(state.request, state.layout)
        self.encoder.add(state)
        for sequence in state.sequences:
            sequence.tokens = list(state.layout.tokens)
            sequence.max_tokens = self._config.max_tokens_of(state.request)
            sequence.prefix_match = None
            sequence.prompt_length = len(state.layout.tokens)
            if sequence.chain is not None:
                sequence.chain.set_spans(state.layout.spans)
            if sequence.num_computed_tokens == len(sequence.tokens):  # nothing was added: sample at the end
                sequence.num_computed_tokens -= 1
            if sequence.slot is not None:
                sequence.prompt_changed = True
                self.trim(sequence)

    def cache_blocks(self, sequence: Sequence, computed: int) -> None:
        """The output of a step has arrived that computed the sequence up to `computed`: unpin the views
        before that, and enter full blocks into the prefix cache."""
        if sequence.pins:
            self.encoder.unpin(sequence, computed)
        if self.prefix is None or sequence.chain is None:
            return
        sequence.chain.extend(sequence.tokens)
        for index in range(sequence.num_cached_blocks, computed // self._block_size):
            own = sequence.blocks[index]
            block = self.prefix.insert(sequence.chain, index, own)
            if block != own:
                self._replace_block(sequence, index, own, block)
            sequence.num_cached_blocks = index + 1

    def _replace_block(self, sequence: Sequence, index: int, own: int, block: int) -> None:
        """The cache already has the content in `block`: use that in all sequences that share `own`. Otherwise
        they would hold what follows a cached block without holding the block."""
        for sibling in sequence.state.sequences:
            if index < len(sibling.blocks) and sibling.blocks[index] == own:
                self.pool.acquire(block)
                self.pool.release(own)
                sibling.blocks[index] = block
                sibling.dirty_blocks.append(index)

    def free(self, sequence: Sequence) -> None:
        """Free everything the sequence holds; nothing of it counts as computed."""
        if sequence.pins:
            self.encoder.unpin(sequence)
        for block in reversed(sequence.blocks):  # the end of a chain is evicted before its beginning
            self.pool.release(block)
        sequence.blocks, sequence.dirty_blocks, sequence.host_blocks = [], [], ()
        sequence.num_computed_tokens = sequence.num_cached_blocks = 0
        sequence.awaits_output = False

    # Stats and checks

    def stats(self) -> dict[str, int]:
        """Names as in EngineStats."""
        pool, swap = self.pool, self.swap.space.stats
        pinned = self.prefix.pinned if self.prefix is not None else PinnedPrefixes((), 0)
        idle = sum(pool.ref_count(block) == 1 for block in pinned.blocks)
        states = ("vision_blocks_used", "vision_blocks_cached", "vision_blocks_free")
        return {
            "blocks_used": pool.used - idle,
            "blocks_cached": pool.cached,
            "blocks_free": pool.free,
            "blocks_pinned": idle,
            "blocks_spared": pool.shared_refs - len(pinned.blocks) + idle,
            "pin_refusals": pinned.refusals,
            **dict(zip(states, pool.counts(vision=True), strict=True)),
            **swap._asdict(),
        }

    def check(self, running: Iterable[Sequence], states: Iterable[RequestState]) -> None:
        """Raise unless what sequences hold is exactly what pool and encoder cache count."""
        self.pool.check()
        self._encoder_cache.check()
        self.swap.space.check()
        self.encoder.named.check(states)
        if self.prefix is not None:
            self.prefix.check()
        holders: Counter[int] = Counter(self.prefix.pinned.blocks if self.prefix is not None else ())
        pins: Counter[bytes] = Counter()
        for sequence in running:
            holders.update(sequence.blocks)
            pins.update(span.key for span in sequence.pins.values())
            self._check_blocks(sequence)
        counted = {block: self.pool.ref_count(block) for block in range(self.pool.count)}
        if any(counted[block] != holders[block] for block in counted):
            raise RuntimeError("the blocks held by sequences and the pool's counts differ")
        if dict(pins) != self._encoder_cache.pins:
            raise RuntimeError("the views pinned by sequences and the encoder cache's pins differ")

    def _check_blocks(self, sequence: Sequence) -> None:
        if len(sequence.blocks) * self._block_size < sequence.num_computed_tokens:
            raise RuntimeError(f"sequence {sequence.seq_id} is computed beyond its blocks")
        vision_blocks = self.vision_blocks(sequence.state)
        for index, block in enumerate(sequence.blocks):
            if self.pool.in_vision(block) != (index in vision_blocks):
                raise RuntimeError(f"block {index} of sequence {sequence.seq_id} is in the wrong pool")
        for block in sequence.blocks[sequence.num_computed_tokens // self._block_size :]:
            if not self.pool.is_writable(block):
                raise RuntimeError(f"sequence {sequence.seq_id} is about to write shared block {block}")
