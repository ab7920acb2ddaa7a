"""Views kept on the device for a sequence that is about to compute their tokens.

takes   a sequence, and the spans it comes to
gives   the pins; whether all of some views could have one at once
owns    nothing: a sequence has its pins, the store counts them
never   has a view made
"""

from collections.abc import Callable, Iterable
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.scheduler.sequence import Sequence
from saccade.step_plan import Span


class Pinning:
    def __init__(self, store: EncoderCache[Any]) -> None:
        self._store = store

    def pin(self, sequence: Sequence, span: Span) -> None:
        made = not self._store.is_ready(span.key)  # by the step being planned
        self._store.pin(span.key)
        sequence.pins[span.start] = span
        if made and span.view.content in sequence.group.deleted:
            self._store.discard(span.key)

    def pin_ready(self, sequence: Sequence, spans: Iterable[Span]) -> bool:
        """Pin views that are there for a sequence that has no pins yet; none, and False, if one of them is
        not. Pinning one may send another away that nobody has pinned."""
        for span in spans:
            if not self._store.is_ready(span.key):
                self.drop(sequence)
                return False
            self.pin(sequence, span)
        return True

    def passed(self, sequence: Sequence, computed: int) -> None:
        """It is computed so far, and that is known."""
        self._unpin(sequence, lambda span: span.stop <= computed)

    def taken_back(self, sequence: Sequence, end: int) -> None:
        """What stood behind the first `end` tokens stands there no more."""
        self._unpin(sequence, lambda span: span.start >= end)

    def drop(self, sequence: Sequence) -> None:
        self._unpin(sequence, lambda span: True)

    def _unpin(self, sequence: Sequence, which: Callable[[Span], bool]) -> None:
        for span in [span for span in sequence.pins.values() if which(span)]:
            self._store.unpin(sequence.pins.pop(span.start).key)
