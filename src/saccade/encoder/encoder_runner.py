"""Views become features: pixels go up, patches are made and packed, the tower runs, the results are split.

takes   `EncodeTask`s: a view, the raw pixels it looks at, and which layers of the tower it is to pass
gives   one feature tensor per view that has passed them all, [tokens, (1 + deep levels) * out_dim]
owns    the preprocessing tables of its device, and the pixels that lie there
never   keeps features, or decides what to encode; what is between two slices is kept in `PartialViews`
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.encoder.encoder_graphs import EncoderGraphs, TowerGraph, TowerStages
from saccade.encoder.partial_views import PartialViews
from saccade.encoder.preprocess import PixelProcessing, Preprocessor, ResampleTables
from saccade.encoder.upload import PinnedStaging, PixelUploads
from saccade.host.allocator import copy_to_own_mapping
from saccade.inputs.media.rgbx import contiguous
from saccade.models.layers import PatchGrid, VisionTower
from saccade.request import Pixels
from saccade.step_plan import EncodeTask

log = logging.getLogger(__name__)

# Bound the tower's activations; a larger view goes alone. A CPU gains nothing from more: its products are as
# long as it has patches, and 16,384 took 200 MiB of heap for a moment.
PATCHES_PER_CALL = {"cuda": 16384, "cpu": 4096}


class PartialEncoding(NamedTuple):
    """What a view is between two layers."""

    layer: int  # the next one
    stream: Tensor  # [P, hidden]
    levels: tuple[Tensor, ...]  # deep levels so far, [tokens, out_dim] each


class EncoderRunner:
    """The vision tower and what precedes it, on one device."""

    def __init__(
        self,
        tower: VisionTower,
        processing: PixelProcessing | Sequence[PixelProcessing],
        device: torch.device,
        dtype: torch.dtype,
        unfinished: PartialViews[PartialEncoding] | None = None,
        graphs: EncoderGraphs | None = None,
        patches_per_call: int | None = None,
    ) -> None:
        """`processing` is what the checkpoint does to pictures, or that and what it does to video frames.
        Without `unfinished` every view must go in one slice; without `graphs` none is captured."""
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._unfinished = unfinished if unfinished is not None else PartialViews(0)
        self._graphs = graphs
        self._uploads = PixelUploads(PinnedStaging(device).send) if device.type == "cuda" else None
        self._patches_per_call = patches_per_call or PATCHES_PER_CALL[device.type]
        known = processing if isinstance(processing, Sequence) else (processing,)
        tables = ResampleTables(device)
        self._preprocessors = {one.digest: Preprocessor(one, device, tables, tower.mode) for one in known}

    @torch.inference_mode()
    def encode(self, encodes: Sequence[EncodeTask], *, capture: bool = False) -> dict[bytes, Tensor]:
        """The features of each view that is complete, by its key. `capture`: at once what is not captured
        yet. After an error none of them can be carried on."""
        features: dict[bytes, Tensor] = {}
        for group, carrier in self._calls(encodes, capture=capture):
            features |= self._pass(group, carrier, self._take(group))
        return features

    @torch.inference_mode()
    def try_encode(self, encodes: Sequence[EncodeTask]) -> tuple[dict[bytes, Tensor], dict[bytes, str]]:
        """The same; views of a call that fails, for want of memory say, are tried again, each alone and
        uncaptured. Gives also those that cannot be made, by key: why. Those must be given up."""
        features: dict[bytes, Tensor] = {}
        failed: dict[bytes, str] = {}
        for group, carrier in self._calls(encodes, capture=False):
            made = self._try(group, carrier)
            if isinstance(made, dict):
                features |= made
                continue
            for encode in group:
                again = len(group) > 1 or carrier is not self._tower
                made = self._try([encode], self._tower) if again else made
                if isinstance(made, dict):
                    features |= made
                else:
                    failed[encode.key] = made
        return features, failed

    def _try(self, group: Sequence[EncodeTask], carrier: TowerStages) -> dict[bytes, Tensor] | str:
        """The features of the views that are complete, or why there are none: then nothing has changed."""
        halves = self._take(group)
        try:
            return self._pass(group, carrier, halves)
        except Exception as error:
            log.exception("%d views of %s patches could not be encoded", len(group), group[0].view.grid)
            why = _why(error)
        # Behind the except, whose error holds on to all that the call had on the device.
        for encode, half in zip(group, halves, strict=False):
            self._unfinished.put_back(encode.key, half)
        return why

    def _pass(
        self, group: Sequence[EncodeTask], carrier: TowerStages, halves: Sequence[PartialEncoding]
    ) -> dict[bytes, Tensor]:
        """One call of the tower; `halves`: what slices before left, of views not at their first."""
        first, stop = group[0].first_layer, group[0].stop_layer
        grids, tokens = [one.view.grid for one in group], [one.view.tokens for one in group]
        blank = carrier.views - len(group) if isinstance(carrier, TowerGraph) else 0
        layout = self._tower.layout(grids + grids[-1:] * blank)
        levels: list[Tensor] = []
        if first:
            stream, levels = _resume(halves)
        else:
            stream = carrier.begin(self._packed(group), layout)
        end = self._tower.depth if stop is None else stop
        stream, more = carrier.carry(stream, layout, first, end)
        levels += more
        if stop is not None:
            self._leave(group, stop, stream, levels, lent=carrier is not self._tower)
            return {}
        features = carrier.finish(stream, levels)[: sum(tokens)]
        parts = self._split(features, tokens, copy=blank > 0)
        return {encode.key: part for encode, part in zip(group, parts, strict=True)}

    def _calls(
        self, encodes: Sequence[EncodeTask], *, capture: bool
    ) -> Iterator[tuple[list[EncodeTask], TowerStages]]:
        """Alike views in the graphs of their shape; what has none is packed, alike or not. In the
        deterministic mode each goes alone, captured from the first time on: always the same kernels."""
        rest: list[EncodeTask] = []
        alone = self._tower.mode.deterministic
        for _, alike in groupby(sorted(encodes, key=_order), key=self._likeness):
            views = list(alike)
            while views:
                count = 1 if alone else self._next_call(views)
                step, found = self._find(views[0], count, now=capture or alone)
                some, views = views[:count], views[count:]
                if found is None:
                    rest += some
                else:
                    yield from ((some[first : first + step], found) for first in range(0, len(some), step))
        for group in self._groups(rest):
            yield group, self._tower

    def _likeness(self, encode: EncodeTask) -> tuple[int, int | None, int, PatchGrid | None]:
        """Views that have it in common can go in one captured call."""
        return (
            encode.first_layer,
            encode.stop_layer,
            encode.patches,
            encode.view.grid if self._tower.by_grid else None,
        )

    def _find(self, encode: EncodeTask, count: int, *, now: bool) -> tuple[int, TowerGraph | None]:
        """Graphs for so many views like this, and for how many at a time: all, or a part that has graphs."""
        if self._graphs is None:
            return count, None
        shape = self._graphs.shape_for(encode.view.grid, count)
        found = self._graphs.find(shape, now=now)
        part = self._graphs.find_fewer_views(shape) if found is None else None
        return (count, found) if part is None else (part[0].views, part[1])

    def views_per_call(self, size: int, views: int) -> int:
        """How many views a captured call for so many of `size` patches has."""
        return self._graphs.views_per_call(size, views) if self._graphs is not None else 1

    def _next_call(self, alike: Sequence[EncodeTask]) -> int:
        """The same for these; blank ones only where nothing of them is left half way."""
        if self._graphs is None:
            return len(alike)
        whole = alike[0].first_layer == 0 and alike[0].stop_layer is None
        return self._graphs.views_per_call(alike[0].patches, len(alike), padding=whole)

    def _groups(self, encodes: Sequence[EncodeTask]) -> Iterator[list[EncodeTask]]:
        """Neighbours that pass the same layers and fit the patch budget of one call together."""
        group: list[EncodeTask] = []
        patches = 0
        for encode in encodes:
            other = group and (group[0].first_layer, group[0].stop_layer) != (
                encode.first_layer,
                encode.stop_layer,
            )
            full = self._tower.mode.deterministic or patches + encode.patches > self._patches_per_call
            if group and (other or full):
                yield group
                group, patches = [], 0
            group.append(encode)
            patches += encode.patches
        if group:
            yield group

    # Between slices

    def _take(self, group: Sequence[EncodeTask]) -> list[PartialEncoding]:
        """What the slices before left, of views that are not at their first."""
        halves = [self._unfinished.take(encode.key) for encode in group if encode.first_layer]
        for encode, half in zip(group, halves, strict=False):
            if half.layer != encode.first_layer:
                raise RuntimeError(
                    f"a view has passed {half.layer} layers; a slice from {encode.first_layer} came"
                )
        return halves

    def _leave(
        self, group: Sequence[EncodeTask], stop: int, stream: Tensor, levels: Sequence[Tensor], *, lent: bool
    ) -> None:
        """`lent`: stream and levels may be buffers that the next call overwrites."""
        tokens = [encode.view.tokens for encode in group]
        streams = self._split(stream, [encode.patches for encode in group], copy=lent)
        split = [self._split(level, tokens, copy=lent) for level in levels]
        for place, encode in enumerate(group):
            own = tuple(level[place] for level in split)
            self._unfinished.keep(encode.key, PartialEncoding(stop, streams[place], own))

    def _split(self, packed: Tensor, sizes: Sequence[int], *, copy: bool = False) -> list[Tensor]:
        """To be kept: a copy each where there are several, or none would be freed before its neighbours are;
        and of all on a CPU, where what is kept is not to lie among activations."""
        if self._device.type == "cpu":
            return [copy_to_own_mapping(part) for part in torch.split(packed, list(sizes))]
        if len(sizes) == 1 and not copy:
            return [packed]
        return [part.clone() for part in torch.split(packed, list(sizes))]

    # From pixels to patches

    @torch.inference_mode()
    def preprocess(self, encode: EncodeTask) -> Tensor:
        """The patches of a view, and nothing more."""
        return self._packed([encode])

    def _packed(self, group: Sequence[EncodeTask]) -> Tensor:
        frames = self._upload(group)
        return _join([self._patches(frames[id(encode.pixels)], encode) for encode in group])

    def _upload(self, group: Sequence[EncodeTask]) -> dict[int, Tensor]:
        """The pixels of a group on the device, by identity of the array: views of one picture share it."""
        distinct = {id(encode.pixels): encode for encode in group}
        return {name: self.upload(one.pixels, one.view.content) for name, one in distinct.items()}

    def upload(self, pixels: Pixels, content: bytes = b"") -> Tensor:
        """A copy on the device, to be read only, that does not wait for it. `content`: of which picture."""
        if self._uploads is not None:
            return self._uploads.send(pixels, content)
        own = contiguous(pixels)
        # A read-only array is not one torch would wrap.
        return torch.from_numpy(own.copy() if own is pixels else own)

    def forget_image(self, content: bytes) -> None:
        """A picture was deleted."""
        if self._uploads is not None:
            self._uploads.forget(content)

    def prefetch_pixels(self, pixels: Pixels, content: bytes) -> None:
        """Views of these may come next: where copies are kept, have one ready. The host copies them while the
        device does something else. Who needs what could not be sent now sends it then."""
        if self._uploads is not None and pixels.size:
            with suppress(torch.OutOfMemoryError):
                self._uploads.send(pixels, content)

    def _patches(self, frames: Tensor, encode: EncodeTask) -> Tensor:
        preprocessor = self._preprocessors.get(encode.view.processing)
        if preprocessor is None:
            raise ValueError(
                f"a view was made for processing {encode.view.processing.hex()}; this encoder knows "
                f"{', '.join(name.hex() for name in self._preprocessors)}"
            )
        return preprocessor.patches(frames, encode.view, self._dtype)


def _order(encode: EncodeTask) -> tuple[int, int, int, PatchGrid]:
    """Alike ones together; of those, grids together, whose tables then lie where they are read."""
    stop = -1 if encode.stop_layer is None else encode.stop_layer
    return encode.first_layer, stop, encode.patches, encode.view.grid


def _resume(halves: Sequence[PartialEncoding]) -> tuple[Tensor, list[Tensor]]:
    """Views half way, packed."""
    levels = [list(level) for level in zip(*(half.levels for half in halves), strict=True)]
    return _join([half.stream for half in halves]), [_join(level) for level in levels]


def _why(error: Exception) -> str:
    """As its sender may read it; the log has the rest."""
    short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return "the device is short of memory" if short else "the vision tower failed"


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
