"""Which views a step encodes and which it pins: whole, or some layers of the vision tower at a time.

While answers stream, a view's layers are spread over as many steps as the step target needs, and the
sequences that need the view wait for the last slice. Otherwise a view is encoded in one step. A partly
encoded view is kept as long as any request has the view ahead of it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.errors import ImageNotFound
from saccade.request import Media
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.sequence import RequestState, Sequence, image_placeholder
from saccade.scheduler.step_builder import StepBuilder
from saccade.step_plan import EncodeTask, Span

IMAGE_NOT_FOUND = ImageNotFound.code
IMAGE_EVICTED = "an image of this request is no longer cached; send the request again with the image's bytes"


class NamedImages:
    """Images that a request names without sending pixels: answered from the encoder or the prefix cache.

    A named image is known if its features are in any tier, or if the prefix cache holds all of its tokens.
    Features are held until the request ends. If they are lost anyway (KV evicted before it starts, a damaged
    file), the request ends with an error, and the client sends it again with the bytes.
    """

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


class EncoderScheduler:
    def __init__(
        self, config: SchedulerConfig, cache: EncoderCache[Any], partial: PartialViews[Any] | None
    ) -> None:
        self._config = config
        self.cache = cache
        self.named = NamedImages(cache)
        self.partial = partial if partial is not None else PartialViews(config.max_encode_patches)
        # Unfinished requests by view key, and by the content of their images.
        self._by_view: dict[bytes, set[RequestState]] = {}
        self._by_image: dict[bytes, set[RequestState]] = {}

    def add(self, state: RequestState) -> None:
        for span in state.layout.spans:
            self._by_view.setdefault(span.key, set()).add(state)
            self._by_image.setdefault(span.view.content, set()).add(state)

    def remove(self, state: RequestState) -> None:
        for key in {span.key for span in state.layout.spans}:
            _discard(self._by_view, key, state)
        for content in {span.view.content for span in state.layout.spans}:
            _discard(self._by_image, content, state)

    def delete_image(self, content: bytes) -> None:
        """What present requests encode of the image is not shared with later ones."""
        for state in self._by_image.get(content, ()):
            state.deleted.add(content)

    # Views of the next chunk

    def prepare_views(self, step: StepBuilder, sequence: Sequence, tokens: int, *, must: bool) -> int:
        """Pin the views among the next `tokens`, and encode missing ones within the step's budgets. Gives how
        many of the tokens can be computed: up to the first view that is being fetched or stays incomplete.
        With `must` the step encodes some of one in any case."""
        start = sequence.num_computed_tokens
        for span in sequence.spans(start, start + tokens):
            if span.start in sequence.pins:
                continue
            ready = self.cache.is_ready(span.key)
            if not ready and not self._encode(step, sequence.state, span, must=must):
                return max(span.start - start, 0)
            self._pin(sequence, span)
        return tokens

    def _encode(self, step: StepBuilder, state: RequestState, span: Span, *, must: bool) -> bool:
        """Encode what the step can afford of a view, something in any case if it `must` and has no view yet;
        gives whether that completes it."""
        key, pixels = span.key, state.pixels[span.key]
        if self.cache.is_fetching(key):
            return False
        if not pixels.size:
            self.named.lost[state.request.id] = None
            return False
        step.view_requests.setdefault(key, []).append(state)
        if key in step.views:
            return False  # another request needs it as well
        patches = span.view.grid[0] * span.view.grid[1]
        must = must and not step.encodes  # otherwise a view larger than the budget would never be encoded
        if patches > step.patches_left and not must:
            return False
        done = self.partial.layers(key) if self.partial.views else 0
        depth = self._config.encode_layers
        stop = done + self._fit_layers(step, patches, depth - done, done, must=must)
        if stop == done or (stop < depth and not done and not self._make_room(step, patches)):
            return False
        whole = stop == depth
        step.encode(EncodeTask(span.view, key, pixels, done, None if whole else stop), (stop - done) / depth)
        if not whole:
            self.partial.advance(key, patches, stop)
        elif done:
            self.partial.finish(key)
        return whole

    def _fit_layers(self, step: StepBuilder, patches: int, left: int, done: int, *, must: bool) -> int:
        """How many of the `left` layers fit; preferably up to the end of a captured segment of layers."""
        if step.target is None:
            return left
        depth, unit = self._config.encode_layers, min(self._config.encode_unit, left)
        until = step.target if step.encode_until is None else step.encode_until
        if must:
            until = max(until, step.milliseconds + self._config.min_encode_time * step.target)
        layers = step.cost.layers_within(until, step.work, patches, depth, left)
        if layers < left and layers > (excess := (done + layers) % self._config.encode_unit):
            layers -= excess
        if must:
            return max(layers, 1)
        return layers if layers >= unit else 0

    def _make_room(self, step: StepBuilder, patches: int) -> bool:
        """For one more partly encoded view, by dropping those untouched for longest; never this step's."""
        views = self.partial
        for key in views.keys:
            if views.patches + patches <= views.capacity:
                break
            if key not in step.views:
                views.drop(key)
        return not len(views) or views.patches + patches <= views.capacity

    # Pins: views kept on the device for a sequence that is about to compute their tokens

    def _pin(self, sequence: Sequence, span: Span) -> None:
        encoded_now = not self.cache.is_ready(span.key)
        self.cache.pin(span.key)
        sequence.pins[span.start] = span
        if encoded_now and span.view.content in sequence.state.deleted:
            self.cache.discard(span.key)

    def unpin(self, sequence: Sequence, computed: int | None = None) -> None:
        """Views up to `computed` tokens, or all of them."""
        for span in list(sequence.pins.values()):
            if computed is None or span.stop <= computed:
                self.cache.unpin(sequence.pins.pop(span.start).key)

    # Partly encoded views

    def drop_unneeded(self) -> None:
        for key in self.partial.keys:
            if not self._requests_ahead(key):
                self.partial.drop(key)

    def _requests_ahead(self, key: bytes) -> list[RequestState]:
        """Requests with a sequence that has yet to compute tokens of the view."""
        return [state for state in self._by_view.get(key, ()) if _is_ahead(state, key)]

    def fail_step(self, keys: Collection[bytes]) -> list[RequestState]:
        """A step with slices of these views failed: gives the requests that need them."""
        for key in keys:
            self.partial.drop(key)
        return [state for key in keys for state in self._requests_ahead(key)]

    def fail_views(self, step: StepBuilder, failed: Mapping[bytes, str]) -> dict[str, str]:
        """Views could not be encoded (by key: why): gives error messages for the requests that came to one in
        this step. Requests that have it ahead try again when they come to it."""
        messages: dict[str, str] = {}
        for key, why in failed.items():
            self.partial.drop(key)
            readers = [
                one.state for one, _, item in step.planned if any(span.key == key for span in item.spans)
            ]
            for state in (*step.view_requests[key], *readers):
                messages.setdefault(state.request.id, _failure_message(state, key, why))
        return messages

    def check(self, launching: Iterable[bytes]) -> None:
        """Raise if a partly encoded view is not needed, or complete; `launching` are the views of steps whose
        output is not known yet."""
        self.partial.check()
        states = {state for states in self._by_view.values() for state in states}
        shown = {(span.view.content, state) for state in states for span in state.layout.spans}
        if shown != {(content, state) for content, states in self._by_image.items() for state in states}:
            raise RuntimeError("the images of requests and the requests by image differ")
        for key in self.partial.keys:
            if not self._requests_ahead(key):
                raise RuntimeError(f"view {key.hex()[:12]} is kept partly encoded, but no request needs it")
            if self.partial.layers(key) >= self._config.encode_layers:
                raise RuntimeError(f"view {key.hex()[:12]} is kept partly encoded with all layers planned")
        if left := set(self.partial.finishing) - set(launching):
            raise RuntimeError(f"{len(left)} views are complete, but still kept partly encoded")


def _discard(index: dict[bytes, set[RequestState]], key: bytes, state: RequestState) -> None:
    index[key].discard(state)
    if not index[key]:
        del index[key]


def _is_ahead(state: RequestState, key: bytes) -> bool:
    stops = [span.stop for span in state.layout.spans if span.key == key]
    return any(one.num_computed_tokens < stop for one in state.sequences for stop in stops)


def _failure_message(state: RequestState, key: bytes, why: str) -> str:
    media = sorted(state.request.media, key=lambda item: item.placeholder)
    placeholders = [item.placeholder for item in media if item.origin is None]
    placeholder = next(image_placeholder(item) for item in media if item.view.key == key)
    frames, height, width, _ = state.pixels[key].shape
    kind = "image" if frames == 1 else "video frame"
    name = f"{kind} {placeholders.index(placeholder) + 1} of this request ({width}x{height} pixels)"
    return f"{name} could not be encoded: {why}; try again, or send it smaller"
