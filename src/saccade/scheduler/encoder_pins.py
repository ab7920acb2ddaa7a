"""Views kept on the device for a sequence that is about to compute their tokens.

takes   a sequence, and the spans it comes to
gives   the pins
owns    nothing: a sequence has its pins, the store counts them
never   has a view made
"""

from collections.abc import Callable
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

    def passed(self, sequence: Sequence, computed: int) -> None:
        """It is computed so far, and that is known."""
        self._unpin(sequence, lambda span: span.stop <= computed)

    def drop(self, sequence: Sequence) -> None:
        self._unpin(sequence, lambda span: True)

    def _unpin(self, sequence: Sequence, which: Callable[[Span], bool]) -> None:
        for span in [span for span in sequence.pins.values() if which(span)]:
            self._store.unpin(sequence.pins.pop(span.start).key)
