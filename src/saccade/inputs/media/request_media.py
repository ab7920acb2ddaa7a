"""The pictures and videos of a request, from what was given to views and pixels.

takes   `MediaPart`s; how the checkpoint processes them; what the context still holds
gives   one `LoadedMedia` per part: its views, their pixels, and the text before each
owns    the threads that fetch and decode; budgets of the pixels being decoded
never   decodes a picture before it is known that all pictures of the request fit: into the context, into
        `max_request_pixels`, and into what all requests may have decoded at the same time

Three stages: every picture is fetched and its size read; sizes are checked; then they are decoded, and the
videos, whose sizes only their decoder knows, with the same checks once it has told.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs import image_processor as geometry
from saccade.inputs.image_processor import ImageProcessing, VideoProcessing
from saccade.inputs.media import hashing, video
from saccade.inputs.media import loader as source
from saccade.inputs.media.cancellation import CancelToken, FairSemaphore
from saccade.inputs.media.image_names import ImageName, ImageNames, ImageReference
from saccade.inputs.media.part import MediaPart
from saccade.request import Pixels, View
from saccade.request_timing import RequestTiming

Item = TypeVar("Item")
Result = TypeVar("Result")

LOADERS = 32  # threads; they wait for remote pictures more than they compute
DECODING_PIXELS = 64_000_000  # decoded at once: while it is converted, a pixel takes up to 19 bytes
REQUESTS_AT_ONCE = 2  # of the largest size that may be held decoded while being prepared
WAIT_SECONDS = 120.0  # for a part of those budgets


@dataclass(frozen=True)
class LoadedMedia:
    """What stands for one picture or video in the prompt: text between views, and the views' pixels."""

    kind: str
    stamps: tuple[str, ...]  # text before each view; for a picture one empty text
    views: tuple[View, ...]
    pixels: tuple[Pixels, ...]
    name: str = ""  # of a picture: its reference
    without_pixels: bool = False  # it was only named


@dataclass(frozen=True)
class LoadContext:
    """For whom media are loaded."""

    salt: bytes
    trusted: bool  # paths and objects are taken, not only URLs
    cancel: CancelToken
    field: str  # what the caller's words are called in errors
    room: Callable[[int], object]  # told how many visual tokens there are; raises when they do not fit
    timing: RequestTiming  # told where the time goes
    # Told the sizes of all pictures, gives their tokens; None: each at full detail.
    cost: Callable[[Sequence[tuple[int, int]]], int] | None = None


class _Tally:
    """Tokens and pixels of one request as they become known."""

    def __init__(self, limits: MediaLimits, terms: LoadContext) -> None:
        self._lock = threading.Lock()
        self._limits = limits
        self._terms = terms
        self.tokens = 0
        self.pixels = 0

    def add(self, tokens: int, pixels: int) -> None:
        with self._lock:
            self.tokens += tokens
            self.pixels += pixels
        self.check()

    def check(self) -> None:
        most = self._limits.max_request_pixels
        if self.pixels > most:
            raise MediaRefused(
                f"The pictures and frames of the request have {self.pixels} pixels together; at most {most}"
                " are allowed. Send fewer or smaller ones.",
                param=self._terms.field,
            )
        self._terms.room(self.tokens)


class MediaLoader:
    """Loads the media of one checkpoint's requests, several at once. Thread-safe."""

    def __init__(
        self, image: ImageProcessing | None, video: VideoProcessing | None, limits: MediaLimits
    ) -> None:
        self._image = image
        self._video = video
        self._limits = limits
        self._pool = ThreadPoolExecutor(LOADERS, thread_name_prefix="media")
        self._closed = CancelToken()
        self._decoding = FairSemaphore(max(DECODING_PIXELS, limits.max_pixels))
        self._held = FairSemaphore(REQUESTS_AT_ONCE * limits.max_request_pixels)
        self.names = ImageNames()

    def close(self) -> None:
        """Ends the threads; requests whose media are being loaded fail."""
        self._closed.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, parts: Sequence[MediaPart], terms: LoadContext) -> list[LoadedMedia]:
        """The visuals of a request, in order. What was given twice is loaded once."""
        if not parts:
            return []
        cancel = CancelToken()  # of this request's threads: one part that fails ends the others
        inner = replace(terms, cancel=cancel)
        distinct = {_identity(part): part for part in parts}
        with terms.cancel.on_cancel(cancel.cancel), self._closed.on_cancel(cancel.cancel):
            loaded = self._load(distinct, [_identity(part) for part in parts], inner)
        return [loaded[_identity(part)] for part in parts]

    def _load(
        self, parts: dict[Hashable, MediaPart], order: Sequence[Hashable], terms: LoadContext
    ) -> dict[Hashable, LoadedMedia]:
        pictures = {key: part for key, part in parts.items() if part.kind == "image"}
        videos = {key: part for key, part in parts.items() if part.kind == "video"}
        with terms.timing.measure("fetch"):
            found = self._spread(lambda part: self._sight(part, terms), pictures, terms)
        tally = _Tally(self._limits, terms)
        # Each time it stands in the prompt: the engine is sent its pixels each time.
        sizes = [found[key].size for key in order if key in found]
        tally.tokens += terms.cost(sizes) if terms.cost else sum(map(self._tokens, sizes))
        tally.pixels += sum(found[key].pixels for key in order if key in found)
        tally.check()
        # A video's frames are counted at the most they may be: their number is not known yet.
        held = tally.pixels + len(videos) * (video.FRAME_BYTES // 3)
        with terms.timing.measure("unpack"), _unless_free(self._held, held, terms.cancel):
            sized = {key: (part, found[key]) for key, part in pictures.items()}
            decoded = self._spread(lambda one: self._picture(*one, terms), sized, terms)
            times = {key: order.count(key) for key in videos}
            counted = {key: (part, times[key]) for key, part in videos.items()}
            return decoded | self._spread(lambda one: self._movie(*one, tally, terms), counted, terms)

    def _tokens(self, size: tuple[int, int]) -> int:
        """Of a picture; the same for its EXIF orientation, which swaps rows and columns."""
        view = geometry.plain_view(b"", size, self._image_processing())
        return view.tokens

    def _sight(self, part: MediaPart, terms: LoadContext) -> source.OpenedImage:
        with _naming(part):
            self._image_processing()
            if isinstance(part.source, ImageName):
                reference = self.names.find(terms.salt, part.source, part.where or None)
                geometry.check_size(reference.width, reference.height)
                return source.open_named_image(*reference, terms.salt)
            return source.open_image(
                part.source, self._limits, terms.salt, trusted=terms.trusted, cancel=terms.cancel
            )

    def _picture(self, part: MediaPart, sighted: source.OpenedImage, terms: LoadContext) -> LoadedMedia:
        width, height = sighted.size
        with _naming(part), _unless_free(self._decoding, sighted.pixels, terms.cancel):
            picture = sighted.decode()
            if not sighted.without_pixels:
                height, width = picture.pixels.shape[1:3]
            view = geometry.plain_view(picture.content, (width, height), self._image_processing())
        reference = ImageReference(picture.digest, width, height)
        if part.uuid is not None:
            self.names.learn(terms.salt, part.uuid, reference)
        return LoadedMedia("image", ("",), (view,), (picture.pixels,), str(reference), sighted.without_pixels)

    def _movie(self, part: MediaPart, times: int, tally: _Tally, terms: LoadContext) -> LoadedMedia:
        processing = self._video
        if processing is None:
            raise MediaRefused("This model takes no videos.", param=part.where or None)

        def admit(frames: int, width: int, height: int) -> None:
            view = geometry.video_view(b"", (width, height), frames, processing)
            views = len(processing.groups(frames))
            tally.add(times * views * view.tokens, times * frames * width * height)

        with _naming(part):
            loaded = source.load_video(
                part.source,
                processing,
                self._limits,
                terms.salt,
                trusted=terms.trusted,
                cancel=terms.cancel,
                admit=admit,
            )
        return _video_visual(loaded, processing)

    def _image_processing(self) -> ImageProcessing:
        if self._image is None:
            raise MediaRefused("This model takes no images.")
        return self._image

    def _spread(
        self, work: Callable[[Item], Result], items: dict[Hashable, Item], terms: LoadContext
    ) -> dict[Hashable, Result]:
        """`work` on every item, several at once; the first failure in their order is the one raised."""
        if len(items) <= 1:
            return {key: work(item) for key, item in items.items()}
        futures: dict[Hashable, Future[Result]] = {}
        try:
            for key, item in items.items():
                futures[key] = self._pool.submit(work, item)
            return {key: future.result() for key, future in futures.items()}
        except BaseException as error:
            terms.cancel.cancel()
            begun = [future for future in futures.values() if not future.cancel()]
            wait(begun)  # what they hold in memory is accounted for until they are over
            if isinstance(error, RuntimeError):
                self._closed.raise_if_cancelled()  # closed before all were begun
            raise


def _identity(part: MediaPart) -> Hashable:
    """What was given twice is loaded once; under each of its names, if it is given several."""
    given = part.source
    return part.kind, given if isinstance(given, str | bytes | ImageName) else id(given), part.uuid


def _unless_free(budget: FairSemaphore, units: int, cancel: CancelToken) -> AbstractContextManager[None]:
    """A part of the budget, once it is there; whoever needs nothing waits for nobody."""
    return budget.holding(units, cancel, WAIT_SECONDS) if units else nullcontext()


@contextmanager
def _naming(part: MediaPart) -> Iterator[None]:
    """A refusal says which part it is about."""
    try:
        yield
    except MediaRefused as error:
        if error.param is None and part.where:
            error.param = part.where
        raise


def _video_visual(loaded: source.LoadedVideo, processing: VideoProcessing) -> LoadedMedia:
    frames, height, width = loaded.frames.shape[:3]
    groups = processing.groups(frames)
    views = []
    for group in groups:
        content = hashing.frames_hash(loaded.content, [loaded.indices[place] for place in group])
        views.append(geometry.video_view(content, (width, height), frames, processing))
    return LoadedMedia(
        "video",
        tuple(
            f"<{seconds:.1f} seconds>" for seconds in processing.timestamps(list(loaded.indices), loaded.fps)
        ),
        tuple(views),
        tuple(loaded.frames[group] for group in groups),
    )
