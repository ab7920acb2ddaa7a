"""Which pictures were deleted: KV computed from an earlier edition of one is never found again.

takes   the contents of deleted pictures
gives   what the names of a picture's views in the prefix cache say of its edition
never   frees a block: what cannot be found is given up in its turn, like all that nobody asks for
"""

from collections.abc import Sequence

from saccade.step_plan import Span

MOST = 1 << 16  # pictures told apart; beyond, one deletion hides the KV of all pictures


class Editions:
    def __init__(self) -> None:
        self._era = 0
        self._deleted: dict[bytes, int] = {}  # content -> how often

    def delete(self, content: bytes) -> None:
        self._deleted[content] = self._deleted.get(content, 0) + 1
        if len(self._deleted) > MOST:
            self._era += 1
            self._deleted.clear()

    def marks(self, spans: Sequence[Span]) -> dict[bytes, bytes]:
        """By content; pictures without one are of the first edition."""
        if not self._deleted and not self._era:
            return {}
        marks = {span.view.content: self._edition(span.view.content) for span in spans}
        return {content: edition for content, edition in marks.items() if edition}

    def _edition(self, content: bytes) -> bytes:
        times = self._deleted.get(content, 0)
        return f" edition {self._era}.{times}".encode() if times or self._era else b""
