"""What sequences hold of the KV pool and of the feature store: the only place that takes and gives back.

takes   sequences, and how far they are to be computed
gives   blocks and pinned features to them; what a step must copy and encode for it
owns    every reference the sequences have to blocks, every pin
never   decides who runs or who gives way

The device runs steps strictly in the order of their plans, and a plan is launched (its features put in the
store) before the scheduler is called again. So a sequence's `computed` counts what is *planned*: whatever a
later plan reads has been written by then. The same order makes it safe to release a block at once, though
a step in flight may still write to it: the next holder's first write, or copy into it, comes later. What
must wait for the *result* is sealing a block for others to find: only then are its tokens known.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.pinned_prefixes import PinnedPrefixes
from saccade.kv_cache.pool_sizing import VisionBlocks
from saccade.kv_cache.prefix_cache import HashChain, PrefixCache, match_groups
from saccade.request import Pixels
from saccade.scheduler.encoder_pins import Pinning
from saccade.scheduler.encoder_scheduler import Making
from saccade.scheduler.named_images import Named
from saccade.scheduler.policy import Allowance, Limits, refuse_unplaceable
from saccade.scheduler.sequence import Group, Sequence
from saccade.scheduler.step_builder import Step
from saccade.scheduler.swap_policy import Swapping
from saccade.step_plan import Span


class HeadStart(NamedTuple):
    blocks: list[int]  # on the device, to be shared; the last one may hold only some of its tokens
    computed: int  # tokens it has with them and with what comes from the host
    slots: tuple[int, ...] = ()  # of the host, of the blocks behind those


class Lack(NamedTuple):
    """Blocks missing in each pool."""

    text: int
    vision: int


class Holdings:
    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        prefix: PrefixCache | None,
        store: EncoderCache[Any],
        swapping: Swapping,
        unfinished: PartialViews[Any] | None = None,
    ) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._pool = pool
        self._prefix = prefix
        self._store = store
        self.making = Making(limits, unfinished)
        self.swapping = swapping
        if prefix is not None:
            prefix.on_evict = swapping.space.save_evicted
        self.named = Named(store)
        self.pinning = Pinning(store)

    # How much there is

    def lacks(self, sequence: Sequence, stop: int) -> int:
        """Blocks missing in the pool for the sequence to be computed up to `stop`."""
        text, vision = self._needs(sequence, stop)
        left = self._pool.num_available
        return max(text - left(), 0) + max(vision - left(vision=True), 0)

    def _needs(self, sequence: Sequence, stop: int) -> tuple[int, int]:
        """Blocks it does not have yet of its tokens up to `stop`: of the text pool and of the vision pool."""
        have, wanted = len(sequence.blocks), self._limits.blocks_for(stop)
        vision = self.kinds(sequence.group).among(have, wanted) if self._pool.has_vision_pool else 0
        return max(wanted - have, 0) - vision, vision

    def kinds(self, group: Group) -> VisionBlocks:
        """Which blocks of its sequences are the vision pool's."""
        if group.kinds is None or group.kinds[0] is not group.layout:
            group.kinds = group.layout, VisionBlocks(group.layout.spans, self._size, self._pool.roles)
        return group.kinds[1]

    def frees(self, sequence: Sequence, *, vision: bool = False) -> bool:
        """Whether the pool may gain a block of that kind if the sequence gives way, alone or with others."""
        pool = self._pool
        return not pool.has_vision_pool or any(pool.in_vision(one) == vision for one in sequence.blocks)

    def competes(self, sequence: Sequence, head: Sequence, *, rows: int) -> bool:
        """Whether a sequence that enters could take what `head` waits for: with two pools not if that is the
        blocks of views, the sequence has none, and a row and blocks for its text are left for the head."""
        if not self._pool.has_vision_pool or rows < 2:
            return True
        text, views = self._needs(sequence, sequence.claim)
        theirs, _ = self._needs(head, head.claim)
        return bool(views) or text + theirs > self._pool.num_available()

    def _refuse_unplaceable(self, group: Group, limit: int) -> None:
        """Raise for a request of up to `limit` tokens whose blocks one of the pools could never hold."""
        if self._pool.has_vision_pool:
            wanted = self._limits.blocks_for(limit - 1)
            vision = self.kinds(group).among(0, wanted)
            sizes = self._pool.size(vision=False), self._pool.size(vision=True)
            refuse_unplaceable((wanted - vision, vision), sizes, self._limits)

    def owes(self, sequence: Sequence) -> int:
        """Blocks a running sequence needs to grow by one more, for text as all answers are; it has those of
        all its tokens so far."""
        soon = min(sequence.length + self._size, sequence.limit - 1)
        return max(self._limits.blocks_for(soon) - len(sequence.blocks), 0)

    def must_encode(self, sequence: Sequence) -> bool:
        """Whether a view of it is neither among the features nor in the part its prefix would spare."""
        return not all(self._store.is_expected(span.key) for span in self._unspared(sequence))

    def _unspared(self, sequence: Sequence) -> Ordered[Span]:
        """Its views outside the part its prefix would spare."""
        if not sequence.group.layout.spans:
            return ()
        return sequence.spans(self._head_start(sequence).computed, sequence.prompt_length)

    def queue(self, sequence: Sequence) -> bool:
        """Whether views of it must be encoded. Those on disk will be in memory when its turn comes."""
        unspared = self._unspared(sequence)
        for span in unspared:
            self._store.prefetch(span.key)
        return not all(self._store.is_expected(span.key) for span in unspared)

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether a view of it is being fetched, and nothing is gained by letting it enter before."""
        spans = sequence.group.layout.spans
        return any(self._store.is_fetching(span.key) and not self._store.is_ready(span.key) for span in spans)

    def poll(self) -> None:
        """What threads and other servers did with features since the last step."""
        for content in self._store.poll():
            self._hide(content)

    def forget(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """A picture is deleted; `then` is called when its files are gone too."""
        self._store.delete_image(content, then)
        self._hide(content)

    def _hide(self, content: bytes) -> None:
        self.making.deleted(content)
        if self._prefix is not None:
            self._prefix.image_versions.delete(content)

    # Entering

    def admit(self, group: Group) -> None:
        """A request comes; raises if it has no place, or names a picture that is not kept."""
        self._refuse_unplaceable(group, group.choices[0].limit)
        if any(item.without_pixels for item in group.request.media):
            self.named.admit(group, self._unspared(group.choices[0]))
        self.making.came(group)

    def may_begin(self, sequence: Sequence) -> bool:
        """Whether its tokens are known, and nothing is gained by waiting for views that are being fetched."""
        return sequence.may_enter() and not self._awaits(sequence)

    def begin(self, sequence: Sequence, owed: int) -> Lack | None:
        """Let the sequence share the blocks that already hold its beginning, if the rest of it has a place
        too beside what is `owed` to others; else leave everything as it was, and say what it lacks."""
        head = self._head_start(sequence)
        lack = self._share(sequence, head, owed)
        # Without the last block, whose copy would need a place beside the original, it may fit.
        whole = head.computed // self._size
        if lack is None or len(head.blocks) == whole:
            return lack
        return self._share(sequence, HeadStart(head.blocks[:whole], whole * self._size), owed)

    def _head_start(self, sequence: Sequence) -> HeadStart:
        """What spares it computing its beginning. The last token is computed in any case: there would be
        nothing to sample from without it."""
        blocks, shared = self._known(sequence)
        donor = sequence.donor()
        if donor is not None and donor.prompt_length > shared:
            blocks, shared = donor.blocks, donor.prompt_length
        computed = min(shared, sequence.length - 1)
        whole = computed // self._size
        slots, restored = self.swapping.find(sequence, whole)
        if slots and restored > computed:
            return HeadStart(blocks[:whole], restored, tuple(slots))
        return HeadStart(blocks[: self._limits.blocks_for(computed)], computed)

    def _known(self, sequence: Sequence) -> tuple[list[int], int]:
        """The blocks of the prefix cache that hold its beginning, and how many of its tokens; the last block
        may hold only some of those it stands for. A few tokens are sooner computed than copied, but not
        those of a view, whose features they would need."""
        if self._prefix is None or sequence.chain is None:
            return [], 0
        state = self._prefix.version, len(sequence.tokens)  # it is asked thrice on its way in
        if sequence.known is None or sequence.known[0] != state:
            sequence.known = state, self._find(self._prefix, sequence, sequence.chain)
        return sequence.known[1]

    def _find(self, prefix: PrefixCache, sequence: Sequence, chain: HashChain) -> tuple[list[int], int]:
        chain.extend(sequence.tokens)
        (blocks,) = match_groups((prefix,), chain)
        shared = len(blocks) * self._size
        part = prefix.match_partial(chain, len(blocks), sequence.tokens)
        if part and self._pool.has_vision_pool:  # the other pool's blocks may be of another precision
            alike = self._pool.in_vision(part.block) == (len(blocks) in self.kinds(sequence.group))
            part = part if alike else None
        if part and (part.tokens >= self._limits.copy_tokens or sequence.spans(shared, shared + part.tokens)):
            return [*blocks, part.block], shared + part.tokens
        return blocks, shared

    def _share(self, sequence: Sequence, head: HeadStart, owed: int) -> Lack | None:
        blocks = head.blocks
        for block in blocks:
            self._pool.acquire(block)
        sequence.blocks, sequence.computed, sequence.host = list(blocks), head.computed, head.slots
        sequence.stale = list(range(len(blocks)))
        text, vision = self._needs(sequence, sequence.claim)
        if len(blocks) > head.computed // self._size:  # its next token falls into a block to be copied
            copied = self._pool.in_vision(blocks[-1])
            text, vision = text + (not copied), vision + copied
        left = self._pool.num_available
        lack = Lack(max(text - left() + owed, 0), max(vision - left(vision=True), 0))
        if not any(lack):
            return None
        self.drop(sequence)
        return lack

    def copy_on_write(self, step: Step, sequence: Sequence) -> None:
        """If its next token falls into a shared block, give the sequence a copy of that block to write.

        The original stays held until `copied`, so that no copy's source is another one's target.
        """
        index = sequence.computed // self._size
        if index < len(sequence.blocks):
            copy = self._pool.allocate(vision=self._pool.in_vision(sequence.blocks[index]))
            step.copies.append((sequence.blocks[index], copy))
            sequence.blocks[index] = copy

    def bring_back(self, step: Step, sequence: Sequence) -> None:
        """Have the step fill blocks for it from the host, if that is how it got on."""
        first, slots = len(sequence.blocks), self.swapping.redeem(sequence)
        self.extend(sequence, (first + len(slots)) * self._size if slots else 0)
        step.swap_ins += zip(slots, sequence.blocks[first:], strict=True)

    def copied(self, step: Step) -> None:
        for source, _ in step.copies:
            self._pool.release(source)

    # Running

    def portion(self, step: Step, sequence: Sequence, allowance: Allowance) -> int:
        """How many of its tokens a prompt gets in this step, the views among them found or encoded."""
        tokens = min(sequence.remaining, step.tokens_left, allowance.tokens)
        least = min(tokens, allowance.least)
        tokens = step.affords(sequence.computed, tokens, allowance.until, least)
        must = allowance.least > 0  # the first prompt of a class gets on, come what may
        seen = self.see(step, sequence, tokens, must=must) if tokens else 0
        if step.encodes:  # they take their time too
            seen = min(seen, step.affords(sequence.computed, seen, allowance.until, max(least, 1)))
        if seen:
            allowance.tokens -= seen
            allowance.least = 0
        return seen

    def see(self, step: Step, sequence: Sequence, tokens: int, *, must: bool) -> int:
        """Pin the views among the next `tokens`, have those encoded that nobody has; gives how many of the
        tokens may be computed: they stop before the first view that is being fetched, or not complete with
        what the step affords. With `must` it affords something of one in any case."""
        start = sequence.computed
        for span in sequence.spans(start, start + tokens):
            if span.start in sequence.pins:
                continue
            if not self._store.is_ready(span.key):
                pixels = sequence.group.pixels[span.key]
                if not pixels.size and not self._store.is_fetching(span.key):
                    self.named.lose(sequence.group)
                if not self._makes(step, sequence.group, span, pixels, must=must):
                    return max(span.start - start, 0)
            self.pinning.pin(sequence, span)
        return tokens

    def _makes(self, step: Step, group: Group, span: Span, pixels: Pixels, *, must: bool) -> bool:
        """Whether the step completes the view; not if there is nothing to do but wait for it."""
        if not pixels.size or self._store.is_fetching(span.key):
            return False
        return self.making.carry_on(step, group, span, pixels, must=must)

    def extend(self, sequence: Sequence, stop: int) -> None:
        """Take the blocks the sequence needs to be computed up to `stop`."""
        while len(sequence.blocks) * self._size < stop:
            index = len(sequence.blocks)
            sequence.stale.append(index)
            vision = self._pool.has_vision_pool and index in self.kinds(sequence.group)
            sequence.blocks.append(self._pool.allocate(vision=vision))

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind its tokens: its prompt has become shorter than it could have been."""
        while len(sequence.blocks) > self._limits.blocks_for(sequence.length):
            self._pool.release(sequence.blocks.pop())
        sequence.stale = [index for index in sequence.stale if index < len(sequence.blocks)]

    def settle(self, sequence: Sequence, computed: int) -> None:
        """The result has arrived of a step that computed the sequence up to `computed`: the views it has
        passed are unpinned, the blocks it has filled can be found by others."""
        self.pinning.passed(sequence, computed)
        if self._prefix is None or sequence.chain is None:
            return
        sequence.chain.extend(sequence.tokens)
        for index in range(sequence.sealed, computed // self._size):
            own = sequence.blocks[index]
            block = self._prefix.insert(sequence.chain, index, own)
            if block != own:
                self._move(sequence, index, own, block)
            sequence.sealed = index + 1

    def _move(self, sequence: Sequence, index: int, own: int, block: int) -> None:
        """The same content was there before, in `block`: move over to it, with the choices that share `own`.
        They would else hold what follows without holding what it was sealed to follow."""
        for choice in sequence.group.choices:
            if index < len(choice.blocks) and choice.blocks[index] == own:
                self._pool.acquire(block)
                self._pool.release(own)
                choice.blocks[index] = block
                choice.stale.append(index)

    # Leaving

    def drop(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds; it starts again from nothing."""
        self.pinning.drop(sequence)
        for block in reversed(sequence.blocks):  # the end of a chain before its beginning
            self._pool.release(block)
        sequence.blocks, sequence.stale, sequence.host = [], [], ()
        sequence.computed = sequence.sealed = 0
        sequence.looking = False

    def gone(self, group: Group) -> None:
        """A request has ended."""
        self.making.gone(group)
        self.named.release(group)

    # How it stands

    def counted(self) -> dict[str, int]:
        """Names as in EngineStats."""
        pool, swap = self._pool, self.swapping.space.stats
        pins = self._prefix.pinned if self._prefix is not None else PinnedPrefixes((), 0)
        idle = sum(pool.ref_count(block) == 1 for block in pins.blocks)
        states = ("vision_blocks_used", "vision_blocks_cached", "vision_blocks_free")
        return {
            "blocks_used": pool.used - idle,
            "blocks_cached": pool.cached,
            "blocks_free": pool.free,
            "blocks_pinned": idle,
            "blocks_spared": pool.shared_refs - len(pins.blocks) + idle,
            "pin_refusals": pins.refusals,
            **dict(zip(states, pool.counts(vision=True), strict=True)),
            **swap._asdict(),
        }

    def check(self, running: Iterable[Sequence], groups: Iterable[Group]) -> None:
        """Raise unless what sequences hold, and requests rely on, is exactly what pool and store think."""
        self._pool.check()
        self._store.check()
        self.swapping.space.check()
        self.named.check(groups)
        if self._prefix is not None:
            self._prefix.check()
        holders: Counter[int] = Counter(self._prefix.pinned.blocks if self._prefix is not None else ())
        pins: Counter[bytes] = Counter()
        for sequence in running:
            holders.update(sequence.blocks)
            pins.update(span.key for span in sequence.pins.values())
            if len(sequence.blocks) * self._size < sequence.computed:
                raise RuntimeError(f"sequence {sequence.handle} is computed beyond its blocks")
            kinds = self.kinds(sequence.group)
            for index, block in enumerate(sequence.blocks):
                if self._pool.in_vision(block) != (index in kinds):
                    raise RuntimeError(f"block {index} of sequence {sequence.handle} is in the wrong pool")
            for block in sequence.blocks[sequence.computed // self._size :]:
                if not self._pool.is_writable(block):
                    raise RuntimeError(
                        f"sequence {sequence.handle} is about to write block {block} of others"
                    )
        counted = {block: self._pool.ref_count(block) for block in range(self._pool.count)}
        if any(counted[block] != holders[block] for block in counted):
            raise RuntimeError("the blocks held by sequences and the pool's counts differ")
        if dict(pins) != self._store.pins:
            raise RuntimeError("the views pinned by sequences and the store's pins differ")
