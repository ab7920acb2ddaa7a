"""Views become features: pixels go up, patches are made and packed, the tower runs, the results are split.

takes   `Encode`s: a view and the raw pixels it looks at
gives   one feature tensor per view, [tokens, (1 + deep levels) * out_dim], on the device
owns    the preprocessing tables of its device
never   keeps features or decides what to encode
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from saccade.models.layers import VisionTower
from saccade.plan import Encode
from saccade.request import Pixels
from saccade.vision.preprocess import PixelProcessing, Preprocessor, ResampleTables

PATCHES_PER_CALL = 16384  # bounds the tower's activations; a larger view goes alone


class Encoder:
    """The vision tower and what precedes it, on one device."""

    def __init__(
        self,
        tower: VisionTower,
        processing: PixelProcessing | Sequence[PixelProcessing],
        device: torch.device,
        dtype: torch.dtype,
        patches_per_call: int = PATCHES_PER_CALL,
    ) -> None:
        """`processing` is what the checkpoint does to pictures, or that and what it does to video frames."""
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._patches_per_call = patches_per_call
        known = processing if isinstance(processing, Sequence) else (processing,)
        tables = ResampleTables(device)
        self._preprocessors = {one.digest: Preprocessor(one, device, tables) for one in known}

    @torch.inference_mode()
    def encode(self, encodes: Sequence[Encode]) -> list[Tensor]:
        """The features of each view, in order."""
        features: list[Tensor] = []
        for group in self._groups(encodes):
            frames = self._upload(group)
            parts = [self._patches(frames[id(encode.pixels)], encode) for encode in group]
            packed = parts[0] if len(parts) == 1 else torch.cat(parts)
            result = self._tower(packed, [encode.view.grid for encode in group])
            sizes = [encode.view.tokens for encode in group]
            # A copy each, or the store would free nothing until the whole group has left it.
            features += [result] if len(group) == 1 else [part.clone() for part in result.split(sizes)]
        return features

    def _groups(self, encodes: Sequence[Encode]) -> Iterator[list[Encode]]:
        """Neighbours that fit the patch budget of one call together."""
        group: list[Encode] = []
        patches = 0
        for encode in encodes:
            size = encode.view.grid[0] * encode.view.grid[1]
            if group and patches + size > self._patches_per_call:
                yield group
                group, patches = [], 0
            group.append(encode)
            patches += size
        if group:
            yield group

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


def _to_device(pixels: Pixels, device: torch.device) -> Tensor:
    """A copy on the device that does not wait for it."""
    pinned = device.type == "cuda"
    host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=pinned)
    host.numpy()[...] = pixels  # the array may be read-only shared memory, which torch will not wrap
    return host.to(device, non_blocking=True) if pinned else host
