"""Images that a request names without sending pixels: answered from the encoder cache or the prefix cache.

A named image is known if its features are in any tier, or if the prefix cache holds all of its tokens.
Features are held until the request ends. If they are lost anyway (KV evicted before it starts, a damaged
file), the request ends with an error, and the client sends it again with the bytes.
"""

from collections.abc import Iterable
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.errors import ImageNotFound
from saccade.request import Media
from saccade.scheduler.sequence import RequestState
from saccade.step_plan import Span

IMAGE_NOT_FOUND = ImageNotFound.code
IMAGE_EVICTED = "an image of this request is no longer cached; send the request again with the image's bytes"


class NamedImages:
    def __init__(self, store: EncoderCache[Any]) -> None:
        self._store = store
        self.lost: dict[str, None] = {}  # requests with a view that is neither cached nor being fetched

    def admit(self, state: RequestState, uncached: Iterable[Span]) -> None:
        """Hold the features the request relies on; raises if they are not cached."""
        needed = {span.key for span in uncached}
        absent = _absent(state)
        for key, item in absent.items():
            if key in needed and not self._store.contains(key):
                raise ImageNotFound(
                    f"The image {item.name} is not cached at the detail requested, or no longer; send"
                    " the request again with its bytes.",
                    param="messages",
                )
        for key in absent:
            self._store.hold(key)

    def release(self, state: RequestState) -> None:
        for key in _absent(state):
            self._store.release(key)

    def feature_bytes(self, state: RequestState) -> int:
        """Held for the request: they count like pixels."""
        return sum(map(self._store.nbytes_of, _absent(state)))

    def mark_lost(self, state: RequestState) -> None:
        self.lost[state.request.id] = None

    def take_lost(self) -> list[str]:
        """Requests to be ended."""
        lost, self.lost = self.lost, {}
        return list(lost)

    def kept(self, state: RequestState) -> tuple[int, ...]:
        """Placeholders of images whose features a later request would find; for the first delta only."""
        media = state.request.media if state.first_token_at is None else ()
        return tuple(item.placeholder for item in media if item.name and self._store.contains(item.view.key))

    def check(self, states: Iterable[RequestState]) -> None:
        held: dict[bytes, int] = {}
        for state in states:
            for key in _absent(state):
                held[key] = held.get(key, 0) + 1
        if held != self._store.holds:
            raise RuntimeError("the images named by requests and the encoder cache's holds differ")


def _absent(state: RequestState) -> dict[bytes, Media]:
    """By view key; without an image that is both named and given in the request."""
    named = {item.view.key: item for item in state.request.media if item.without_pixels}
    return {key: item for key, item in named.items() if not state.pixels[key].size}
