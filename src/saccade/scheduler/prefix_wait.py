"""Blocks that are being computed right now, and who had better wait for them than compute them as well.

takes   the running sequences; one that waits
gives   whether enough of what it needs next is being computed by another
owns    nothing beyond the step being planned
never   holds anybody up for a sequence that does not run: who gives way or ends is waited for no more

A block can be shared once the result of the step that fills it has arrived. Of several questions about one
picture that come together, the first computes the picture, the others what is behind it, a step or two later.
"""

from collections.abc import Iterable

from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Sequence


class Coming:
    def __init__(self, limits: Limits, prefix: PrefixCache | None) -> None:
        self._least = limits.blocks_for(limits.wait_tokens)
        self._prefix = prefix
        self._keys: set[bytes] = set()

    def see(self, running: Iterable[Sequence]) -> None:
        """A step is being planned beside these."""
        self._keys = set()
        for sequence in running:
            self.enters(sequence)

    def enters(self, sequence: Sequence) -> None:
        """One more runs, from this step on."""
        if self._prefix is not None and sequence.chain is not None:
            for key in reversed(sequence.chain.keys[sequence.sealed :]):
                if self._prefix.contains(key):
                    break  # and all before it
                self._keys.add(key)

    def still(self, sequence: Sequence) -> bool:
        """Whether what it was to wait for is still being computed: of a thousand questions about one picture
        the others are asked no more than this in every step."""
        return sequence.awaits in self._keys

    def awaited(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence should wait for what another computes."""
        if not self._keys or self._prefix is None or sequence.chain is None:
            return False
        chain = sequence.chain
        chain.extend(sequence.tokens)
        first = stop = len(self._prefix.match(chain))
        while stop < len(chain.keys) and chain.keys[stop] in self._keys:
            stop += 1
        if stop - first < self._least:
            return False
        sequence.awaits = chain.keys[stop - self._least]  # once it is there, too little is left to wait for
        return True
