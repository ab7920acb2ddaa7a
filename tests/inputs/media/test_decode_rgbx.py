"""An image of the library is copied out of Pillow's memory as it is; one identity however it lies there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.config import MediaLimits
from saccade.inputs.media import decode
from saccade.inputs.media.decode import OPAQUE, RgbxWords, contiguous, copy_rgbx, rgb_of_words, words_of_rgb
from saccade.inputs.media.loader import LoadedImage, open_image
from saccade.request import Pixels

NOISE = np.random.default_rng(0).integers(0, 256, (24, 36, 3), dtype=np.uint8)
SCATTERED = (4400, 1000)  # 16.8 MiB: Pillow keeps it in two pieces


def load(source: Any) -> LoadedImage:
    return open_image(source, MediaLimits(), trusted=True).decode()


def plain() -> Image.Image:
    return Image.fromarray(NOISE)


def resized() -> Image.Image:
    """Its fourth bytes are 0."""
    image = plain().resize((31, 17))
    assert image.tobytes("raw", "RGBX")[3] == 0
    return image


def cropped() -> Image.Image:
    return plain().crop((3, 2, 30, 20))


def scattered() -> Image.Image:
    image = Image.linear_gradient("L").resize(SCATTERED).convert("RGB")
    with pytest.raises(ValueError, match="contiguous"):
        image.__arrow_c_array__()
    return image


@pytest.mark.parametrize("make", [plain, resized, cropped, scattered])
def test_pixels_equal_those_of_pillow(make: Callable[[], Image.Image]) -> None:
    image = make()
    words = copy_rgbx(image)
    pixels = rgb_of_words(words)
    np.testing.assert_array_equal(pixels[0], np.asarray(image))
    assert bool((words >> 24 == 255).all())
    assert not pixels.flags.writeable
    assert words_of_rgb(pixels) is words
    packed = contiguous(pixels)
    assert packed.flags.c_contiguous
    np.testing.assert_array_equal(packed, pixels)


@pytest.mark.parametrize("height", [1, 2, 3, 17])
def test_a_copy_by_several_threads_equals_that_of_one(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    image = plain().resize((31, height))
    one = copy_rgbx(image)
    monkeypatch.setattr(decode, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(decode, "COPY_THREADS", 4)
    several = copy_rgbx(image)
    np.testing.assert_array_equal(several, one)
    for array in (NOISE[:height], NOISE[:height, ::2], NOISE[:height, :, ::-1]):
        copy = decode.copy_array(array)
        assert copy.flags.c_contiguous
        assert not np.shares_memory(copy, array)
        np.testing.assert_array_equal(copy, array)
    assert words_of_rgb(rgb_of_words(several)) is several
    with decode.all_cores(1 << 30) as granted, decode.all_cores(1 << 30) as another:  # one image at a time
        assert (granted, another) == (True, False)
    with decode.all_cores(1 << 30) as granted:
        assert granted
    monkeypatch.setattr(decode, "_process", -1)  # as in a child that was forked off: it has no threads
    with decode.all_cores(1 << 30) as granted:
        assert not granted


def test_the_copy_is_independent_of_the_image() -> None:
    image = plain()
    pixels = rgb_of_words(copy_rgbx(image))
    image.paste("red", (0, 0, *image.size))
    del image
    np.testing.assert_array_equal(pixels[0], NOISE)


@pytest.mark.parametrize("make", [plain, resized, cropped])
def test_the_hash_of_an_image_does_not_depend_on_its_memory_layout(
    make: Callable[[], Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make()
    again = Image.fromarray(np.asarray(image))  # its fourth bytes are 255
    names = {load(one).digest for one in (image, again)}
    monkeypatch.setattr(decode, "_borrow", lambda image: None)
    names.add(load(image).digest)
    assert len(names) == 1


def test_every_pixel_band_and_the_shape_change_the_hash() -> None:
    names = set()
    for place in [(0, 0, 0), (0, 0, 2), (0, 35, 1), (12, 17, 2), (23, 35, 2), (23, 0, 0)]:
        other = NOISE.copy()
        other[place] ^= 1
        names |= {load(one).digest for one in (other, Image.fromarray(other))}
    for same in (NOISE, NOISE.reshape(36, 24, 3)):
        names |= {load(one).digest for one in (same, Image.fromarray(same))}
    assert len(names) == 2 * 8


def test_an_array_of_the_library_is_copied() -> None:
    given = NOISE.copy()
    random_image = load(given)
    given[:] = 0
    np.testing.assert_array_equal(random_image.pixels[0], NOISE)


def part(words: RgbxWords) -> Pixels:
    return rgb_of_words(words)[:, 1:]


def bands(words: RgbxWords) -> Pixels:
    return words.view(np.uint8).reshape(1, *words.shape, 4)[..., 1:]


def pixels_alone(words: RgbxWords) -> Pixels:
    return contiguous(rgb_of_words(words))


@pytest.mark.parametrize("make", [part, bands, pixels_alone])
def test_other_arrays_are_not_taken_for_words(make: Callable[[RgbxWords], Pixels]) -> None:
    """Who takes them for that would read beside them."""
    words = np.arange(20, dtype=OPAQUE.dtype).reshape(4, 5)
    assert words_of_rgb(make(words)) is None
