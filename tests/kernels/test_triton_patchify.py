"""Pixels to patches by kernels against the preprocessor, bit for bit."""

import pytest
import torch

from saccade.encoder import preprocess
from saccade.encoder.preprocess import Preprocessor, build_taps
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.kernels.vision.patchify import PatchTuning, patchify_triton, resample_triton
from tests.kernels.buffers import EXACT, Place

PROCESSING = Qwen2VLImageProcessor(
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=784,
    max_pixels=3136,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    rescale_factor=1 / 255,
)


def image(place: Place, frames: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height)
    made = torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=generator)
    made[:, : height // 2, :, 1] = 255  # overshoots at the edge, clipped
    return made.to(place.device)


@pytest.mark.parametrize(("height", "width"), [(28, 56), (20, 40), (90, 30), (1, 1), (9, 60)])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("place", EXACT)
def test_patches_by_kernels_equal_the_preprocessor(
    place: Place, frames: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if frames == 2 and height != 20:
        pytest.skip("one of each is enough")
    pixels = image(place, frames, height, width)
    view = plain_view(b"image", (width, height), PROCESSING)
    made = Preprocessor(PROCESSING, pixels.device)
    expected = made.patches(pixels, view)
    monkeypatch.setattr(preprocess, "use_triton", lambda name, tensor, mode: True)
    assert torch.equal(made.patches(pixels, view), expected)
    assert torch.equal(made.patches(pixels, view, torch.float16), expected.half())


@pytest.mark.parametrize("place", EXACT)
def test_both_passes_take_any_strides(place: Place) -> None:
    pixels = image(place, 1, 12, 12)[0, :, :10]
    first, weights = build_taps(12, 7, pixels.device)
    across = resample_triton(pixels.permute(0, 2, 1), first, weights, "y", PatchTuning(32))
    down = resample_triton(pixels.permute(1, 2, 0), first, weights, "x", PatchTuning(32))
    assert torch.equal(across, down.permute(2, 1, 0))


def test_what_does_not_fit_is_refused() -> None:
    first, weights = build_taps(8, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="float32"):
        resample_triton(torch.zeros(8, 3, 8), first, weights, "x")
    with pytest.raises(ValueError, match="'z'"):
        resample_triton(torch.zeros(8, 3, 8, dtype=torch.uint8), first, weights, "z")
    planes, table = torch.zeros(1, 28, 3, 28, dtype=torch.uint8), torch.zeros(3, 256)
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        patchify_triton(planes, table, (2, 4), 2, 14, 2, torch.float32)
    with pytest.raises(ValueError, match="divide by 3"):
        patchify_triton(planes, table, (2, 2), 3, 14, 2, torch.float32)
