"""The images and videos of a request, from what the caller gave to views and pixels.

Nothing is decoded before all images of the request are known to fit: into the context, into
`max_request_pixels`, and into what all requests together may decode at once. So every image is fetched and
its size read; then sizes are checked; then images are decoded, and videos, whose size only the decoder knows,
with the same checks once it has reported it.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import ImageProcessor, PromptView, Size, VideoProcessor, check_size
from saccade.inputs.media import video
from saccade.inputs.media.cancellation import CancelToken, FairSemaphore
from saccade.inputs.media.fetch import MediaKind
from saccade.inputs.media.image_names import ImageName, ImageNames, ImageReference
from saccade.inputs.media.loader import (
    OpenedImage,
    image_reference,
    load_video,
    open_image,
    open_named_image,
    tenant_hash,
)
from saccade.lod.types import Detail
from saccade.request import Pixels, RequestTiming

Item = TypeVar("Item")
Result = TypeVar("Result")

LOADER_THREADS = 32  # they mostly wait for remote servers
DECODING_PIXELS = 64_000_000  # decoded at once; a pixel takes up to 19 bytes while it is converted
REQUESTS_AT_ONCE = 2  # requests of the largest size whose decoded pixels may be held at once
WAIT_SECONDS = 120.0  # for either of these limits


@dataclass(frozen=True)
class MediaPart:
    """An image or video as the caller gave it."""

    kind: MediaKind
    source: Any  # a URL or an `ImageName`; for the library also bytes, a path, a PIL image, an array
    param: str = ""  # what errors call it, such as "messages[0].content[1]"
    detail: Detail | None = None  # of an image
    uuid: str | None = None  # the client's name for the image


@dataclass(frozen=True)
class LoadedMedia:
    """What replaces one placeholder of the prompt: views, and the pixels that each of them shows."""

    views: tuple[PromptView, ...]
    pixels: tuple[Pixels, ...]
    name: str = ""  # of an image: its reference
    without_pixels: bool = False  # the client sent only its name


@dataclass(frozen=True)
class LoadContext:
    """The request for which media are loaded."""

    salt: bytes
    trusted: bool  # paths and objects are allowed, not only URLs
    cancel: CancelToken
    param: str  # what errors call the prompt
    check_tokens: Callable[[int], object]  # raises if so many visual tokens do not fit
    timing: RequestTiming
    # Most tokens of images of these sizes under level of detail; None: full detail.
    lod_tokens: Callable[[Sequence[Size]], int] | None = None


class _RequestBudget:
    """Counts visual tokens and pixels of one request as they become known, and checks them."""

    def __init__(self, limits: MediaLimits, context: LoadContext) -> None:
        self._lock = threading.Lock()
        self._limits = limits
        self._context = context
        self.tokens = 0
        self.pixels = 0

    def add(self, tokens: int, pixels: int) -> None:
        with self._lock:
            self.tokens += tokens
            self.pixels += pixels
        most = self._limits.max_request_pixels
        if self.pixels > most:
            raise MediaRefused(
                f"The images and frames of the request have {self.pixels} pixels together; at most {most}"
                " are allowed. Send fewer or smaller ones.",
                param=self._context.param,
            )
        self._context.check_tokens(self.tokens)


class MediaLoader:
    """Loads the media of requests, several at once. Thread-safe."""

    def __init__(
        self, image: ImageProcessor | None, video: VideoProcessor | None, limits: MediaLimits
    ) -> None:
        self._image = image
        self._video = video
        self._limits = limits
        self._pool = ThreadPoolExecutor(LOADER_THREADS, thread_name_prefix="media")
        self._closed = CancelToken()
        self._decoding = FairSemaphore(max(DECODING_PIXELS, limits.max_pixels))
        self._held = FairSemaphore(REQUESTS_AT_ONCE * limits.max_request_pixels)
        self.names = ImageNames()

    def close(self) -> None:
        """Ends the threads; requests whose media are being loaded fail."""
        self._closed.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, parts: Sequence[MediaPart], context: LoadContext) -> list[LoadedMedia]:
        """The media of a request in prompt order. A source that occurs twice is loaded once."""
        # With several uuids a source is loaded once for each.
        keys: list[Hashable] = [
            (
                part.kind,
                part.source if isinstance(part.source, str | bytes | ImageName) else id(part.source),
                part.uuid,
                part.detail,
            )
            for part in parts
        ]
        cancel = CancelToken()  # a part that fails cancels the threads of the others
        with context.cancel.on_cancel(cancel.cancel), self._closed.on_cancel(cancel.cancel):
            loaded = self._load(dict(zip(keys, parts, strict=True)), keys, replace(context, cancel=cancel))
        return [loaded[key] for key in keys]

    def _load(
        self, parts: dict[Hashable, MediaPart], keys: Sequence[Hashable], context: LoadContext
    ) -> dict[Hashable, LoadedMedia]:
        images = {key: part for key, part in parts.items() if part.kind == "image"}
        videos = {key: (part, keys.count(key)) for key, part in parts.items() if part.kind == "video"}
        with context.timing.measure("fetch"):
            opened = self._map(lambda part: self._open(part, context), images, context)
        budget = _RequestBudget(self._limits, context)
        # An image counts each time it occurs: the engine receives its pixels each time.
        shown = [(parts[key], opened[key]) for key in keys if key in opened]
        if context.lod_tokens is not None:
            tokens = context.lod_tokens([image.size for _, image in shown])
        else:
            tokens = sum(self._images().num_tokens(image.size, part.detail) for part, image in shown)
        budget.add(tokens, sum(image.pixels for _, image in shown))
        # The number of frames of a video is not known yet: the most that are kept are counted.
        held = budget.pixels + len(videos) * (video.FRAME_BYTES // 3)
        with context.timing.measure("unpack"), self._held.holding(held, context.cancel, WAIT_SECONDS):
            pairs = {key: (part, opened[key]) for key, part in images.items()}
            loaded = self._map(lambda one: self._decode_image(*one, context), pairs, context)
            if videos:
                loaded |= self._map(lambda one: self._load_video(*one, budget, context), videos, context)
            return loaded

    def _open(self, part: MediaPart, context: LoadContext) -> OpenedImage:
        with _naming(part):
            if isinstance(part.source, ImageName):
                reference = self.names.find(context.salt, part.source, part.param or None)
                check_size(reference.width, reference.height)
                return open_named_image(*reference)
            return open_image(part.source, self._limits, trusted=context.trusted, cancel=context.cancel)

    def _decode_image(self, part: MediaPart, opened: OpenedImage, context: LoadContext) -> LoadedMedia:
        width, height = opened.size
        with _naming(part), self._decoding.holding(opened.pixels, context.cancel, WAIT_SECONDS):
            pixels, digest = opened.decode()
            if not opened.without_pixels:
                height, width = pixels.shape[1:3]  # after the EXIF orientation
            content = tenant_hash(digest, context.salt)
            views = self._images().views(content, (width, height), part.detail)
        if part.uuid is not None:
            self.names.learn(context.salt, part.uuid, ImageReference(digest, width, height))
        name = image_reference(digest, width, height)
        return LoadedMedia(views, (pixels,) * len(views), name, opened.without_pixels)

    def _load_video(
        self, part: MediaPart, count: int, budget: _RequestBudget, context: LoadContext
    ) -> LoadedMedia:
        processor = self._video
        if processor is None:
            raise MediaRefused("This model takes no videos.", param=part.param or None)

        def admit(frames: int, width: int, height: int) -> None:
            tokens = processor.num_tokens((width, height), frames)
            budget.add(count * tokens, count * frames * width * height)

        with _naming(part):
            sampled, digest = load_video(
                part.source,
                processor,
                self._limits,
                trusted=context.trusted,
                cancel=context.cancel,
                admit=admit,
            )
        height, width = sampled.frames.shape[1:3]
        content = tenant_hash(digest, context.salt)
        views = processor.views(content, (width, height), sampled.indices, sampled.fps, sampled.total)
        shown = [sampled.frames if one.frames is None else sampled.frames[list(one.frames)] for one in views]
        return LoadedMedia(views, tuple(shown))

    def _images(self) -> ImageProcessor:
        if self._image is None:
            raise MediaRefused("This model takes no images.")
        return self._image

    def _map(
        self, work: Callable[[Item], Result], items: dict[Hashable, Item], context: LoadContext
    ) -> dict[Hashable, Result]:
        """Runs `work` on every item in threads; raises the first failure in their order."""
        if len(items) <= 1:
            return {key: work(item) for key, item in items.items()}
        futures: dict[Hashable, Future[Result]] = {}
        try:
            for key, item in items.items():
                futures[key] = self._pool.submit(work, item)
            return {key: future.result() for key, future in futures.items()}
        except BaseException as error:
            context.cancel.cancel()
            wait([future for future in futures.values() if not future.cancel()])  # they still hold memory
            if isinstance(error, RuntimeError):
                self._closed.raise_if_cancelled()  # the pool was shut down before all were submitted
            raise


@contextmanager
def _naming(part: MediaPart) -> Iterator[None]:
    """Adds to a refusal which part it is about."""
    try:
        yield
    except MediaRefused as error:
        if error.param is None and part.param:
            error.param = part.param
        raise
