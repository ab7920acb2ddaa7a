"""The encoder packs, splits and normalises as each view asks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.media.geometry import ImageProcessing, plain_view
from saccade.models.layers import VisionTower
from saccade.plan import Encode
from saccade.request import Pixels, View
from saccade.vision.encode import Encoder
from saccade.vision.preprocess import patches

CPU = torch.device("cpu")
PROCESSING = ImageProcessing(
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=64,
    max_pixels=4096,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)


class MeanTower(VisionTower):
    """Features of a token: the mean of its patches, and twice that as a deep level; remembers its calls."""

    patch_dim = 3 * 2 * 4 * 4
    merge = 2
    depth_levels = 1
    out_dim = patch_dim

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[tuple[int, int]]] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        self.calls.append(list(grids))
        self.dtypes.add(patches.dtype)
        tokens = patches.view(-1, self.merge**2, self.patch_dim).mean(dim=1)
        return torch.cat([tokens, 2 * tokens], dim=1)


def picture(seed: int, height: int, width: int, frames: int = 1) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def encode_of(pixels: Pixels, view: View | None = None) -> Encode:
    if view is None:
        view = plain_view(bytes(16), (pixels.shape[2], pixels.shape[1]), PROCESSING)
    return Encode(view=view, key=view.key, pixels=pixels)


def expected(encode: Encode, processing: ImageProcessing = PROCESSING) -> Tensor:
    made = patches(torch.from_numpy(encode.pixels), encode.view, processing)
    return MeanTower().forward(made, [encode.view.grid])


def test_each_view_gets_its_own_features_whatever_it_is_packed_with() -> None:
    sizes = [(16, 24), (33, 9), (8, 8), (40, 40)]
    encodes = [encode_of(picture(i, *size)) for i, size in enumerate(sizes)]
    encodes.append(encode_of(picture(9, 20, 30, frames=2)))
    tower = MeanTower()
    features = Encoder(tower, PROCESSING, CPU, torch.float32).encode(encodes)
    assert len(tower.calls) == 1
    for encode, feature in zip(encodes, features, strict=True):
        assert feature.shape == (encode.view.tokens, 2 * tower.out_dim)
        assert torch.equal(feature, expected(encode))


def test_a_call_holds_no_more_patches_than_its_budget_except_one_view_alone() -> None:
    encodes = [encode_of(picture(i, 16, 16 * (1 + i % 3))) for i in range(20)]
    encodes.insert(7, encode_of(picture(99, 60, 60)))
    tower = MeanTower()
    features = Encoder(tower, PROCESSING, CPU, torch.float32, patches_per_call=64).encode(encodes)
    assert [grid for call in tower.calls for grid in call] == [encode.view.grid for encode in encodes]
    for call in tower.calls:
        assert len(call) == 1 or sum(rows * columns for rows, columns in call) <= 64
    assert max(rows * columns for call in tower.calls for rows, columns in call) > 64
    assert all(
        torch.equal(feature, expected(encode)) for encode, feature in zip(encodes, features, strict=True)
    )


def test_features_do_not_keep_their_neighbours_memory() -> None:
    encodes = [encode_of(picture(i, 16, 16)) for i in range(5)]
    for feature in Encoder(MeanTower(), PROCESSING, CPU, torch.float32).encode(encodes):
        assert feature.untyped_storage().nbytes() == feature.nbytes


def test_two_views_of_one_picture_differ_and_a_read_only_array_is_fine() -> None:
    pixels = picture(3, 40, 40)
    pixels.setflags(write=False)
    whole = encode_of(pixels)
    corner = encode_of(
        pixels,
        View(content=bytes(16), box=(0, 0, 20, 20), grid=(4, 4), merge=2, processing=PROCESSING.digest),
    )
    features = Encoder(MeanTower(), PROCESSING, CPU, torch.float32).encode([whole, corner])
    copied = encode_of(pixels.copy(), corner.view)
    assert torch.equal(features[1], expected(copied))
    assert features[0].shape != features[1].shape


def test_a_view_is_processed_as_it_names_and_a_stranger_is_refused() -> None:
    video = replace(PROCESSING, mean=(0.1, 0.2, 0.3))
    pixels = picture(4, 16, 16, frames=2)
    encode = encode_of(pixels, plain_view(bytes(16), (16, 16), video))
    both = Encoder(MeanTower(), (PROCESSING, video), CPU, torch.float32)
    assert torch.equal(both.encode([encode])[0], expected(encode, video))
    with pytest.raises(ValueError, match=encode.view.processing.hex()):
        Encoder(MeanTower(), PROCESSING, CPU, torch.float32).encode([encode])


def test_the_tower_gets_patches_of_its_own_precision() -> None:
    tower = MeanTower()
    features = Encoder(tower, PROCESSING, CPU, torch.bfloat16).encode([encode_of(picture(5, 16, 16))])
    assert tower.dtypes == {torch.bfloat16}
    assert features[0].dtype == torch.bfloat16


def test_nothing_to_encode_gives_nothing() -> None:
    assert Encoder(MeanTower(), PROCESSING, CPU, torch.float32).encode([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_gives_the_same_features() -> None:
    encodes = [encode_of(picture(i, 16 + i, 40 - i)) for i in range(6)]
    features = Encoder(MeanTower(), PROCESSING, torch.device("cuda"), torch.float32).encode(encodes)
    for encode, feature in zip(encodes, features, strict=True):
        assert torch.allclose(feature.cpu(), expected(encode), atol=1e-6)
