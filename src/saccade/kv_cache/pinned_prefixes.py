"""Pinned prefixes: KV blocks of the operator's system prompts, which are never evicted.

Nothing is computed ahead: a tenant's first request computes its copy, since tenants share no blocks. All pins
together leave room for a request of the longest context; further tenants have their prefixes cached like any
others.
"""

from collections.abc import Sequence

from saccade.errors import ConfigError


class PinnedPrefixes:
    def __init__(self, prefixes: Sequence[Sequence[int]], capacity: int) -> None:
        self.prefixes = [tuple(prefix) for prefix in prefixes]
        self.capacity = capacity  # blocks of all tenants together
        self.refusals = 0  # sequences of tenants for whom there was no room
        self._tenants: set[bytes] = set()  # by salt
        self._blocks: dict[bytes, int | None] = {}  # key -> block, None until it is computed

    @property
    def blocks(self) -> list[int]:
        """The blocks pinned so far."""
        return [block for block in self._blocks.values() if block is not None]

    def knows(self, salt: bytes) -> bool:
        return salt in self._tenants

    def admit(self, salt: bytes, keys: Sequence[bytes]) -> None:
        """Reserve room for a tenant whose prefix blocks have these keys. A tenant without keys is not
        remembered, which bounds their number by `capacity`."""
        wanted = set(keys)
        if not wanted:
            return
        if len(self._blocks) + len(wanted) > self.capacity:
            self.refusals += 1
            return
        self._tenants.add(salt)
        self._blocks |= dict.fromkeys(wanted)

    def pin(self, key: bytes, block: int) -> bool:
        """Pin a block that has just been cached, if its key is one of a prefix; gives whether it is."""
        if key not in self._blocks or self._blocks[key] is not None:
            return False
        self._blocks[key] = block
        return True


def validate_pinned_prefixes(
    prefixes: Sequence[Sequence[int]], block_size: int, block_bytes: int, budget: int, room: int
) -> None:
    """Raise unless each prefix fills a block, and all fit a tenant's `budget` (bytes) and the `room`
    (blocks)."""
    shortest = min(map(len, prefixes), default=block_size)
    if shortest < block_size:
        raise ConfigError(
            f"a prefix to pin has {shortest} tokens, and KV is kept by blocks of {block_size}; leave it out, "
            "lengthen it, or lower --block-size"
        )
    blocks = sum(len(prefix) // block_size for prefix in prefixes)
    tokens = sum(len(prefix) for prefix in prefixes)
    if blocks * block_bytes > budget:
        raise ConfigError(
            f"the prefixes to pin have {tokens} tokens, {blocks} KV blocks of {block_bytes} bytes, together "
            f"{blocks * block_bytes}; a tenant may pin {budget}; raise --pinned-prefix-bytes or shorten them"
        )
    if blocks > room:
        raise ConfigError(
            f"the prefixes to pin need {blocks} KV blocks; beside a request of the longest context there is "
            f"room for {max(room, 0)}; give the KV cache more memory or lower --max-model-len"
        )
