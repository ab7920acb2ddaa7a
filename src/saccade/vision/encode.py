"""Views become features: pixels go up, patches are made and packed, the tower runs, the results are split.

takes   `Encode`s: a view, the raw pixels it looks at, and which layers of the tower it is to pass
gives   one feature tensor per view that has passed them all, [tokens, (1 + deep levels) * out_dim]
owns    the preprocessing tables of its device
never   keeps features, or decides what to encode; what is between two slices is kept in `Unfinished`
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.models.layers import VisionTower
from saccade.plan import Encode
from saccade.request import Pixels
from saccade.vision.preprocess import PixelProcessing, Preprocessor, ResampleTables
from saccade.vision.unfinished import Unfinished

PATCHES_PER_CALL = 16384  # bounds the tower's activations; a larger view goes alone


class Halfway(NamedTuple):
    """What a view is between two layers."""

    layer: int  # the next one
    stream: Tensor  # [P, hidden]
    levels: tuple[Tensor, ...]  # deep levels so far, [tokens, out_dim] each


class Encoder:
    """The vision tower and what precedes it, on one device."""

    def __init__(
        self,
        tower: VisionTower,
        processing: PixelProcessing | Sequence[PixelProcessing],
        device: torch.device,
        dtype: torch.dtype,
        unfinished: Unfinished[Halfway] | None = None,
        patches_per_call: int = PATCHES_PER_CALL,
    ) -> None:
        """`processing` is what the checkpoint does to pictures, or that and what it does to video frames.
        Without `unfinished` every view must go in one slice."""
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._unfinished = unfinished if unfinished is not None else Unfinished(0)
        self._patches_per_call = patches_per_call
        known = processing if isinstance(processing, Sequence) else (processing,)
        tables = ResampleTables(device)
        self._preprocessors = {one.digest: Preprocessor(one, device, tables) for one in known}

    @torch.inference_mode()
    def encode(self, encodes: Sequence[Encode]) -> dict[bytes, Tensor]:
        """The features of each view that is complete, by its key. After an error none of them can be carried
        on: the scheduler gives them up."""
        features: dict[bytes, Tensor] = {}
        for group in self._groups(encodes):
            first, stop = group[0].first, group[0].stop
            grids = [encode.view.grid for encode in group]
            levels: list[Tensor] = []
            if first:
                stream, levels = self._resume(group)
            else:
                stream = self._tower.begin(self._packed(group), grids)
            end = self._tower.depth if stop is None else stop
            stream, more = self._tower.carry(stream, grids, first, end)
            levels += more
            if stop is None:
                result = self._tower.finish(stream, levels)
                sizes = [encode.view.tokens for encode in group]
                parts = _split(result, sizes)
                features |= {encode.key: part for encode, part in zip(group, parts, strict=True)}
            else:
                self._leave(group, stop, stream, levels)
        return features

    def _groups(self, encodes: Sequence[Encode]) -> Iterator[list[Encode]]:
        """Views that pass the same layers and fit the patch budget of one call together; alike ones are
        neighbours, for their attention goes in one batch."""
        group: list[Encode] = []
        patches = 0
        for encode in sorted(encodes, key=_likeness):
            other = group and (group[0].first, group[0].stop) != (encode.first, encode.stop)
            if group and (other or patches + encode.patches > self._patches_per_call):
                yield group
                group, patches = [], 0
            group.append(encode)
            patches += encode.patches
        if group:
            yield group

    # Between slices

    def _resume(self, group: Sequence[Encode]) -> tuple[Tensor, list[Tensor]]:
        """What the slices before left, packed."""
        halves = [self._unfinished.take(encode.key) for encode in group]
        for encode, half in zip(group, halves, strict=True):
            if half.layer != encode.first:
                raise RuntimeError(f"a view has passed {half.layer} layers; a slice from {encode.first} came")
        streams = [half.stream for half in halves]
        levels = [list(level) for level in zip(*(half.levels for half in halves), strict=True)]
        return _join(streams), [_join(level) for level in levels]

    def _leave(self, group: Sequence[Encode], stop: int, stream: Tensor, levels: Sequence[Tensor]) -> None:
        tokens = [encode.view.tokens for encode in group]
        streams = _split(stream, [encode.patches for encode in group])
        split = [_split(level, tokens) for level in levels]
        for place, encode in enumerate(group):
            own = tuple(level[place] for level in split)
            self._unfinished.keep(encode.key, Halfway(stop, streams[place], own))

    # From pixels to patches

    def _packed(self, group: Sequence[Encode]) -> Tensor:
        frames = self._upload(group)
        return _join([self._patches(frames[id(encode.pixels)], encode) for encode in group])

    def _upload(self, group: Sequence[Encode]) -> dict[int, Tensor]:
        """The pixels of a group on the device, by identity of the array: views of one picture share it."""
        distinct = {id(encode.pixels): encode.pixels for encode in group}
        return {name: _to_device(pixels, self._device) for name, pixels in distinct.items()}

    def _patches(self, frames: Tensor, encode: Encode) -> Tensor:
        preprocessor = self._preprocessors.get(encode.view.processing)
        if preprocessor is None:
            raise ValueError(
                f"a view was made for processing {encode.view.processing.hex()}; this encoder knows "
                f"{', '.join(name.hex() for name in self._preprocessors)}"
            )
        return preprocessor.patches(frames, encode.view, self._dtype)


def _likeness(encode: Encode) -> tuple[int, int, int, tuple[int, int]]:
    stop = -1 if encode.stop is None else encode.stop
    return encode.first, stop, encode.patches, encode.view.grid


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _split(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """A copy each, or none would be freed before its neighbours are."""
    return [packed] if len(sizes) == 1 else [part.clone() for part in torch.split(packed, list(sizes))]


def _to_device(pixels: Pixels, device: torch.device) -> Tensor:
    """A copy on the device that does not wait for it."""
    pinned = device.type == "cuda"
    host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=pinned)
    host.numpy()[...] = pixels  # the array may be read-only shared memory, which torch will not wrap
    return host.to(device, non_blocking=True) if pinned else host
