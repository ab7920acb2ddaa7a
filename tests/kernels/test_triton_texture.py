"""The texture of an image by kernels, against the reference."""

import pytest
import torch

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.vision.texture import (
    LEAST,
    MOST_CHOSEN,
    TextureTuning,
    channels_triton,
    means_triton,
    shrink_triton,
)
from saccade.lod import scorers as relevance
from saccade.lod import texture
from saccade.lod.texture import CHANNELS, channels, shades, to_working_size
from tests.kernels.buffers import EXACT, Place, assert_near, poison

REFERENCE = KernelMode("torch")
SMALL = TextureTuning(block=32, cells=16)


def image(place: Place, height: int, width: int) -> torch.Tensor:
    """Noise, something flat, strokes."""
    generator = torch.Generator().manual_seed(height * width)
    made = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    made[: height // 3] = 180
    made[height // 2 :, : width // 2 : 5] = 10
    made[height // 2 :, : width // 2, 1] //= 3
    return made.to(place.device)


@pytest.mark.parametrize(
    ("source", "size"),
    [((20, 33), (20, 33)), ((40, 66), (20, 33)), ((47, 71), (20, 33)), ((90, 7), (9, 1)), ((1, 1), (1, 1))],
)
@pytest.mark.parametrize("place", EXACT)
def test_an_image_is_shrunk_to_means(
    place: Place, source: tuple[int, int], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = image(place, *source)
    poison(monkeypatch)
    made = shrink_triton(pixels, size, SMALL)
    planes = pixels.permute(2, 0, 1).double().div(255)
    assert_near(made, torch.nn.functional.adaptive_avg_pool2d(planes[None], size)[0], torch.float32)


@pytest.mark.parametrize("place", EXACT)
def test_images_of_any_strides_are_shrunk(place: Place) -> None:
    pixels = image(place, 30, 40)
    expected = shrink_triton(pixels, (15, 17), SMALL)
    turned = pixels.transpose(0, 1).contiguous().transpose(0, 1)
    planes = pixels.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for one in (turned, planes):
        assert torch.equal(shrink_triton(one, (15, 17), SMALL), expected)


@pytest.mark.parametrize("size", [(LEAST, LEAST), (21, 75), (43, 34), (24, 64)])
@pytest.mark.parametrize("place", EXACT)
def test_all_channels_equal_the_reference(
    place: Place, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = image(place, *size)
    colour = to_working_size(pixels, REFERENCE)
    expected = channels(colour, REFERENCE)
    poison(monkeypatch)
    for tuning in (SMALL, TextureTuning()):
        made = channels_triton(colour.contiguous(), shades(colour.device), tuning)
        for name, one, its in zip(CHANNELS, made, expected, strict=True):
            error = float((one - its).abs().max())
            assert error < 2e-5, f"{name} is off by {error}"


@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (13, 9), (20, 2)])
@pytest.mark.parametrize("place", EXACT)
def test_means_are_those_of_an_adaptive_pool(
    place: Place, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = place.randn(13, 17, 70, seed=3)
    poison(monkeypatch)
    found = means_triton(made, (11, 7, 12), grid)
    assert_near(
        found, torch.nn.functional.adaptive_avg_pool2d(made[None, [11, 7, 12]], grid)[0], torch.float32
    )


@pytest.mark.parametrize("size", [(35, 26), (19, 30), (64, 52)])
@pytest.mark.parametrize("place", EXACT)
def test_maps_by_kernels_equal_the_reference(
    place: Place, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one side is too short for the kernels of the channels, and where it is shrunk before: a mean
    that lies between two shades is then rounded to either."""
    monkeypatch.setattr(texture, "LONGEST", 36)
    pixels = image(place, *size)
    expected = relevance.image_maps(texture.texture(pixels, REFERENCE), (5, 3), mode=REFERENCE)
    asked = []

    def always(name: str, tensor: torch.Tensor, mode: KernelMode) -> bool:
        asked.append(name)
        return True

    for module in (relevance, texture):
        monkeypatch.setattr(module, "use_triton", always)
    found = relevance.image_maps(texture.texture(pixels), (5, 3))
    assert set(asked) == {"texture"}
    assert_near(found, expected, torch.float32, scale=200 if max(size) > texture.LONGEST else 20)


def test_what_does_not_fit_is_refused() -> None:
    pixels = torch.zeros(8, 8, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="float32"):
        shrink_triton(pixels.float(), (4, 4))
    with pytest.raises(ValueError, match="8 x 8 pixels cannot be shrunk to 9 x 4"):
        shrink_triton(pixels, (9, 4))
    with pytest.raises(ValueError, match=f"take {LEAST} and more"):
        channels_triton(torch.zeros(3, LEAST - 1, 40), shades(pixels.device))
    with pytest.raises(ValueError, match="float64"):
        channels_triton(torch.zeros(3, 40, 40, dtype=torch.float64), shades(pixels.device))
    for chosen in ((), (13,), (-1,), range(MOST_CHOSEN + 1)):
        with pytest.raises(ValueError, match="may be chosen"):
            means_triton(torch.zeros(13, 8, 8), chosen, (2, 2))
    with pytest.raises(ValueError, match="contiguous"):
        means_triton(torch.zeros(13, 8, 16)[:, :, ::2], (1,), (2, 2))
