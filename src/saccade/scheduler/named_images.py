"""Pictures that were named and came without pixels: answered from features that are kept, or from KV.

takes   requests with such pictures, and what their prefixes would spare
gives   refusals of pictures that are not kept; which pictures of a request its owner may name later
owns    the holds on features these requests rely on; who has lost one
never   lets a request wait for features that cannot come

A named picture is known if its features are in any tier, or if the prefix cache spares all of its tokens.
Held features stay until the request has ended. What can still go wrong (the KV is given up before its turn, a
file turns out damaged) ends the request with the same error: its owner sends it again with the bytes.
"""

from collections.abc import Iterable
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.errors import ImageNotFound
from saccade.request import Media
from saccade.scheduler.sequence import Group
from saccade.step_plan import Span

CODE = ImageNotFound.code
GONE = "a picture of this request is no longer kept; send the request again with the picture's bytes"


class Named:
    def __init__(self, store: EncoderCache[Any]) -> None:
        self._store = store
        self._lost: dict[str, None] = {}  # requests with a view that is neither kept nor coming

    def admit(self, group: Group, unspared: Iterable[Span]) -> None:
        """Hold what the request relies on; raises if it is not there."""
        needed = {span.key for span in unspared}
        absent = _absent(group)
        for key, item in absent.items():
            if key in needed and not self._store.contains(key):
                raise ImageNotFound(
                    f"The picture {item.name} is not kept here in the detail asked for, or no longer; send"
                    " the request again with its bytes.",
                    param="messages",
                )
        for key in absent:
            self._store.hold(key)

    def release(self, group: Group) -> None:
        for key in _absent(group):
            self._store.release(key)

    def weight(self, group: Group) -> int:
        """Bytes of features held for it: they count as its pixels would."""
        return sum(map(self._store.nbytes_of, _absent(group)))

    def lose(self, group: Group) -> None:
        self._lost[group.request.id] = None

    def take_lost(self) -> list[str]:
        """Requests to be ended."""
        lost, self._lost = self._lost, {}
        return list(lost)

    def kept(self, group: Group) -> tuple[int, ...]:
        """Slots of pictures whose features a later request would find; for its first news alone."""
        media = group.request.media if group.first_at is None else ()
        return tuple(item.placeholder for item in media if item.name and self._store.contains(item.view.key))

    def check(self, groups: Iterable[Group]) -> None:
        held: dict[bytes, int] = {}
        for group in groups:
            for key in _absent(group):
                held[key] = held.get(key, 0) + 1
        if held != self._store.holds:
            raise RuntimeError("the pictures named by requests and the store's holds differ")


def _absent(group: Group) -> dict[bytes, Media]:
    """By view key; a picture that is named and also given in the same request is not."""
    named = {item.view.key: item for item in group.request.media if item.without_pixels}
    return {key: item for key, item in named.items() if not group.pixels[key].size}
