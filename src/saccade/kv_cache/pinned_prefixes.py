"""Beginnings that are never given up: the KV of system prompts named by whoever runs the engine.

takes   the token ids of those beginnings, the tenants as they come, every block that is sealed
gives   which blocks to hold for good
owns    the book of pinned blocks
never   computes anything ahead: a tenant's first request does, and nobody after it

Tenants share nothing, so each has its own copy. All together may hold so many blocks that a request of the
longest context still fits beside them; tenants who come when no more fit have theirs like everybody else's,
as long as nobody needs the place.
"""

from collections.abc import Sequence

from saccade.errors import ConfigError


class PinnedPrefixes:
    def __init__(self, prefixes: Sequence[Sequence[int]], most: int) -> None:
        self.prefixes = [tuple(prefix) for prefix in prefixes]
        self.most = most  # blocks of all tenants together
        self.refusals = 0  # sequences of tenants for whom there was no room
        self._tenants: set[bytes] = set()  # by salt
        self._blocks: dict[bytes, int | None] = {}  # key -> block, None until it is computed

    @property
    def blocks(self) -> list[int]:
        """Those held for good."""
        return [block for block in self._blocks.values() if block is not None]

    def knows(self, salt: bytes) -> bool:
        return salt in self._tenants

    def admit(self, salt: bytes, keys: Sequence[bytes]) -> None:
        """A tenant whose blocks of the beginnings have these keys; without any there is nothing to note, so
        that every tenant noted has a block of `most`."""
        wanted = set(keys)
        if not wanted:
            return
        if len(self._blocks) + len(wanted) > self.most:
            self.refusals += 1
            return
        self._tenants.add(salt)
        self._blocks |= dict.fromkeys(wanted)

    def claims(self, key: bytes, block: int) -> bool:
        """Whether a block that has just been sealed is to be held for good, from now on."""
        if key not in self._blocks or self._blocks[key] is not None:
            return False
        self._blocks[key] = block
        return True


def validate_pinned_prefixes(
    prefixes: Sequence[Sequence[int]], block_size: int, block_bytes: int, budget: int, room: int
) -> None:
    """Raise unless each has a block, and all fit into the `budget` of a tenant (bytes) and into the `room`
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
