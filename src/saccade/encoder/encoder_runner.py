"""The encoder runner: uploads pixels, makes and packs patches, runs the vision tower, splits the features.

`merge_embeddings` then puts the features in place of the placeholders' embeddings. An eager step packs the
features of its visual tokens; a captured step reads them from a static buffer with a row per token, zero
where the token is text. Neither waits for the device.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.encoder.encoder_graphs import EncoderGraphs, TowerGraph
from saccade.encoder.partial_views import PartialViews
from saccade.encoder.preprocess import Preprocessor
from saccade.encoder.upload import PinnedStaging, PixelUploads
from saccade.host.allocator import copy_to_own_mapping
from saccade.inputs.image_processor import PatchSettings
from saccade.inputs.media.decode import contiguous
from saccade.models.interface import DeepStackFeatures, PatchGrid, VisionTower
from saccade.request import Pixels
from saccade.step_plan import EncodeTask, ScheduledSequence, Span

log = logging.getLogger(__name__)
TowerStages = VisionTower | TowerGraph

# Bounds the tower's activations; a larger view runs alone. A CPU gains nothing from larger calls, and 16,384
# patches take 200 MiB of heap.
PATCHES_PER_CALL = {"cuda": 16384, "cpu": 4096}


class PartialEncoding(NamedTuple):
    """A view between two layers of the tower."""

    layer: int  # the next one
    stream: Tensor  # [P, hidden]
    levels: tuple[Tensor, ...]  # deep levels so far, [tokens, out_dim] each


class EncoderRunner:
    def __init__(
        self,
        tower: VisionTower,
        processing: PatchSettings | Sequence[PatchSettings],
        device: torch.device,
        dtype: torch.dtype,
        partial_views: PartialViews[PartialEncoding] | None = None,
        graphs: EncoderGraphs | None = None,
        patches_per_call: int | None = None,
    ) -> None:
        """`processing` is the checkpoint's for images, or those for images and video frames. Without
        `partial_views` every view runs in one slice; without `graphs` every call is eager."""
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._partial = partial_views if partial_views is not None else PartialViews(0)
        self._graphs = graphs
        self._uploads = PixelUploads(PinnedStaging(device).send) if device.type == "cuda" else None
        self._patches_per_call = patches_per_call or PATCHES_PER_CALL[device.type]
        known = processing if isinstance(processing, Sequence) else (processing,)
        self._preprocessors = {one.digest: Preprocessor(one, device, tower.mode) for one in known}

    @torch.inference_mode()
    def encode(self, tasks: Sequence[EncodeTask], *, capture: bool = False) -> dict[bytes, Tensor]:
        """The features [tokens, (1 + deep levels) * out_dim] of each completed view, by key. `capture`
        captures graphs at once. After an error no view of `tasks` can be continued."""
        features: dict[bytes, Tensor] = {}
        for group, stages in self._calls(tasks, capture=capture):
            features |= self._run(group, stages, self._take_partial(group))
        return features

    @torch.inference_mode()
    def try_encode(self, tasks: Sequence[EncodeTask]) -> tuple[dict[bytes, Tensor], dict[bytes, str]]:
        """The same. If a call fails, for example for lack of memory, its views are tried again one by one,
        eagerly. Also gives the reason for each view that cannot be encoded, by key; the caller must drop
        those."""
        features: dict[bytes, Tensor] = {}
        failed: dict[bytes, str] = {}
        for group, stages in self._calls(tasks, capture=False):
            result = self._try(group, stages)
            if isinstance(result, dict):
                features |= result
                continue
            for task in group:
                again = len(group) > 1 or stages is not self._tower
                result = self._try([task], self._tower) if again else result
                if isinstance(result, dict):
                    features |= result
                else:
                    failed[task.key] = result
        return features, failed

    def _try(self, group: Sequence[EncodeTask], stages: TowerStages) -> dict[bytes, Tensor] | str:
        """The features of completed views, or the reason of a failure, after which nothing has changed."""
        partial = self._take_partial(group)
        try:
            return self._run(group, stages, partial)
        except Exception as error:
            log.exception("%d views of %s patches could not be encoded", len(group), group[0].view.grid)
            reason = _failure_reason(error)
        # After the except block: its error keeps the call's tensors alive.
        for task, one in zip(group, partial, strict=False):
            self._partial.put_back(task.key, one)
        return reason

    def _run(
        self, group: Sequence[EncodeTask], stages: TowerStages, partial: Sequence[PartialEncoding]
    ) -> dict[bytes, Tensor]:
        """One call of the tower. `partial` is the state of views that continue."""
        first, stop = group[0].first_layer, group[0].stop_layer
        grids, tokens = [one.view.grid for one in group], [one.view.tokens for one in group]
        padding = stages.views - len(group) if isinstance(stages, TowerGraph) else 0
        layout = self._tower.layout(grids + grids[-1:] * padding)
        levels: list[Tensor] = []
        if first:
            levels = [_join(level) for level in zip(*(one.levels for one in partial), strict=True)]
            stream = _join([one.stream for one in partial])
        else:
            stream = stages.begin(self.preprocess(group), layout)
        end = self._tower.depth if stop is None else stop
        stream, more = stages.carry(stream, layout, first, end)
        levels += more
        if stop is not None:
            self._keep_partial(group, stop, stream, levels, borrowed=stages is not self._tower)
            return {}
        features = stages.finish(stream, levels)[: sum(tokens)]
        parts = self._split(features, tokens, copy=padding > 0)
        return {task.key: part for task, part in zip(group, parts, strict=True)}

    def _calls(
        self, tasks: Sequence[EncodeTask], *, capture: bool
    ) -> Iterator[tuple[list[EncodeTask], TowerStages]]:
        """Views of one shape use its graphs; the others are packed into eager calls. In deterministic mode
        each view runs alone, captured from the first time on, so that the kernels are always the same."""
        eager: list[EncodeTask] = []
        alone = self._tower.mode.deterministic
        same = 4 if self._tower.by_grid else 3  # parts of the sort key that views of a captured call share
        for _, alike in groupby(sorted(tasks, key=_sort_key), key=lambda task: _sort_key(task)[:same]):
            views = list(alike)
            while views:
                count = 1 if alone else self._next_count(views)
                step, found = self._find_graph(views[0], count, now=capture or alone)
                some, views = views[:count], views[count:]
                if found is None:
                    eager += some
                else:
                    yield from ((some[first : first + step], found) for first in range(0, len(some), step))
        for group in self._eager_groups(eager):
            yield group, self._tower

    def _find_graph(self, task: EncodeTask, count: int, *, now: bool) -> tuple[int, TowerGraph | None]:
        """Graphs for `count` views like this, and how many of them a call takes."""
        if self._graphs is None:
            return count, None
        shape = self._graphs.shape_for(task.view.grid, count)
        found = self._graphs.find(shape, now=now)
        fewer = self._graphs.find_fewer_views(shape) if found is None else None
        return (count, found) if fewer is None else (fewer[0].views, fewer[1])

    def views_per_call(self, size: int, views: int) -> int:
        """How many views of `size` patches a captured call takes when there are `views`."""
        return self._graphs.views_per_call(size, views) if self._graphs is not None else 1

    def _next_count(self, alike: Sequence[EncodeTask]) -> int:
        """The same for these tasks; with padding only if they run the whole tower."""
        if self._graphs is None:
            return len(alike)
        whole = alike[0].first_layer == 0 and alike[0].stop_layer is None
        return self._graphs.views_per_call(alike[0].patches, len(alike), padding=whole)

    def _eager_groups(self, tasks: Sequence[EncodeTask]) -> Iterator[list[EncodeTask]]:
        """Neighbours that run the same layers and fit the patch budget of one call."""
        group: list[EncodeTask] = []
        patches = 0
        layers: tuple[int, int | None] | None = None
        for task in tasks:
            full = self._tower.mode.deterministic or patches + task.patches > self._patches_per_call
            if group and (full or layers != (task.first_layer, task.stop_layer)):
                yield group
                group, patches = [], 0
            group.append(task)
            patches, layers = patches + task.patches, (task.first_layer, task.stop_layer)
        if group:
            yield group

    # Between slices

    def _take_partial(self, group: Sequence[EncodeTask]) -> list[PartialEncoding]:
        """The state of the views that continue."""
        partial = [self._partial.take(task.key) for task in group if task.first_layer]
        for task, one in zip(group, partial, strict=False):
            if one.layer != task.first_layer:
                raise RuntimeError(
                    f"a view has passed {one.layer} layers; its slice starts at {task.first_layer}"
                )
        return partial

    def _keep_partial(
        self,
        group: Sequence[EncodeTask],
        stop: int,
        stream: Tensor,
        levels: Sequence[Tensor],
        *,
        borrowed: bool,
    ) -> None:
        """`borrowed`: stream and levels may be buffers that the next call overwrites."""
        tokens = [task.view.tokens for task in group]
        streams = self._split(
            stream, [task.patches + self._tower.extra_rows for task in group], copy=borrowed
        )
        split = [self._split(level, tokens, copy=borrowed) for level in levels]
        for index, task in enumerate(group):
            own = tuple(level[index] for level in split)
            self._partial.keep(task.key, PartialEncoding(stop, streams[index], own))

    def _split(self, packed: Tensor, sizes: Sequence[int], *, copy: bool = False) -> list[Tensor]:
        """Each view gets a copy where there are several, so that it can be freed alone. On a CPU each gets a
        mapping of its own, apart from the heap of activations."""
        if self._device.type == "cpu":
            return [copy_to_own_mapping(part) for part in torch.split(packed, list(sizes))]
        if len(sizes) == 1 and not copy:
            return [packed]
        return [part.clone() for part in torch.split(packed, list(sizes))]

    # From pixels to patches

    @torch.inference_mode()
    def preprocess(self, tasks: Sequence[EncodeTask]) -> Tensor:
        """The patches of some views, packed."""
        distinct = {id(task.pixels): task for task in tasks}  # views of one image share its pixels
        frames = {name: self.upload(one.pixels, one.view.content) for name, one in distinct.items()}
        patches = []
        for task in tasks:
            preprocessor = self._preprocessors.get(task.view.processing)
            if preprocessor is None:
                raise ValueError(
                    f"a view was made for processing {task.view.processing.hex()}; this encoder knows "
                    f"{', '.join(name.hex() for name in self._preprocessors)}"
                )
            patches.append(preprocessor.patches(frames[id(task.pixels)], task.view, self._dtype))
        return _join(patches)

    def upload(self, pixels: Pixels, content: bytes = b"") -> Tensor:
        """A copy on the device, to be read only; the host does not wait for it. `content` is the image's
        hash."""
        if self._uploads is not None:
            return self._uploads.send(pixels, content)
        own = contiguous(pixels)
        # torch does not wrap read-only arrays.
        return torch.from_numpy(own.copy() if own is pixels else own)

    def forget_image(self, content: bytes) -> None:
        """The image was deleted."""
        if self._uploads is not None:
            self._uploads.forget(content)

    def prefetch_pixels(self, pixels: Pixels, content: bytes) -> None:
        """Upload pixels whose views may come next, while the device is busy. Without memory the upload
        happens when a view needs it."""
        if self._uploads is not None and pixels.size:
            with suppress(torch.OutOfMemoryError):
                self._uploads.send(pixels, content)


def _sort_key(task: EncodeTask) -> tuple[int, int, int, PatchGrid]:
    """Views of the same layers and shape together, and equal grids together, whose tables are then copied
    once."""
    stop = -1 if task.stop_layer is None else task.stop_layer
    return task.first_layer, stop, task.patches, task.view.grid


def _failure_reason(error: Exception) -> str:
    """For the client; the log has the details."""
    short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return "the device is short of memory" if short else "the vision tower failed"


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class VisualSlice(NamedTuple):
    """The tokens of a view that a row computes."""

    span: Span
    first: int  # token of the view
    length: int
    position: int  # of the first among all tokens of the rows

    @property
    def indices(self) -> NDArray[np.int64]:
        return np.arange(self.position, self.position + self.length)


def visual_slices(rows: Sequence[ScheduledSequence]) -> Iterator[VisualSlice]:
    offset = 0
    for row in rows:
        for span in row.spans:
            start = max(span.start, row.start)
            stop = min(span.stop, row.start + row.num_tokens)
            if start < stop:
                yield VisualSlice(span, start - span.start, stop - start, offset + start - row.start)
        offset += row.num_tokens


def merge_embeddings(
    embeds: Tensor, rows: Sequence[ScheduledSequence], features: Callable[[bytes], Tensor], depth_levels: int
) -> DeepStackFeatures | None:
    """Write the visual tokens' embeddings into `embeds` [T, H]; gives their deeper (DeepStack) levels, if
    any.

    The T tokens are those of `rows` in order. `features(key)` is [view.tokens, (1 + depth_levels) * H]. A row
    may begin and end inside a view.
    """
    width = (1 + depth_levels) * embeds.shape[1]
    slices = list(visual_slices(rows))
    if not slices:
        return None
    pieces = [_slice_of(features(one.span.key), one, width) for one in slices]
    index = upload_index(np.concatenate([one.indices for one in slices]), embeds.device)
    visual = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(embeds.dtype)
    embeds.index_copy_(0, index, visual[:, : embeds.shape[1]])
    return _deep_levels(visual, embeds.shape[1], index)


def fill_visual_buffer(
    buffer: Tensor, rows: Sequence[ScheduledSequence], features: Callable[[bytes], Tensor]
) -> None:
    """Copy the visual tokens' features into a static buffer [tokens, (1 + depth_levels) * H]. Text tokens get
    zeros, since deeper levels are added to all tokens."""
    buffer.zero_()
    slices = list(visual_slices(rows))
    targets = [buffer[one.position : one.position + one.length] for one in slices]
    # One launch for all: a question may have eight zoomed views.
    torch._foreach_copy_(targets, [_slice_of(features(one.span.key), one, buffer.shape[1]) for one in slices])


def merge_visual_buffer(
    embeds: Tensor, buffer: Tensor, is_visual: Tensor, index: Tensor
) -> DeepStackFeatures | None:
    """The same for a captured step: `index` [tokens] are the buffer's tokens among those of `embeds` [T, H],
    the last ones; `is_visual` [tokens] masks the visual ones."""
    hidden = embeds.shape[1]
    tail = embeds[embeds.shape[0] - buffer.shape[0] :]
    torch.where(is_visual[:, None], buffer[:, :hidden], tail, out=tail)
    return _deep_levels(buffer, hidden, index)


def _slice_of(features: Tensor, one: VisualSlice, width: int) -> Tensor:
    expected = (one.span.view.tokens, width)
    if tuple(features.shape) != expected:
        raise ValueError(f"features of a view have shape {tuple(features.shape)}; its tokens need {expected}")
    return features[one.first : one.first + one.length]


def _deep_levels(visual: Tensor, hidden: int, index: Tensor) -> DeepStackFeatures | None:
    """[n, (1 + D) * H] -> [D, n, H], a view: each level is read once, so packing it gains nothing."""
    if visual.shape[1] == hidden:
        return None
    levels = visual[:, hidden:].view(len(visual), -1, hidden).transpose(0, 1)
    return DeepStackFeatures(index=index, levels=levels)


def upload_index(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Token indices on the device; the host does not wait for the copy."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
