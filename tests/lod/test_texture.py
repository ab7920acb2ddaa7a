"""The texture says what is in a picture, for pictures of any size."""

import pytest
import torch

from saccade.lod import scorers as relevance
from saccade.lod.texture import (
    CHANNELS,
    EDGE,
    EDGE_X,
    EDGE_Y,
    ENTROPY,
    GREEN_RED,
    LIGHT,
    LONGEST,
    TEXT,
    texture,
)
from saccade.tools.evaluation.question_set import example


def plain(height: int, width: int, colour: tuple[int, int, int] = (200, 200, 200)) -> torch.Tensor:
    return torch.tensor(colour, dtype=torch.uint8).expand(height, width, 3).clone()


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (10, 2000), (2000, 10), (5, 3), (64, 64), (900, 1500)])
def test_any_size_has_thirteen_finite_channels_of_bounded_size(size: tuple[int, int]) -> None:
    noise = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = texture(noise)
    assert found.shape[0] == len(CHANNELS) == 13
    assert found.isfinite().all()
    assert max(found.shape[1:]) <= LONGEST
    for grid in ((1, 1), (3, 5)):
        maps = relevance.image_maps(found, grid)
        assert maps.shape == (relevance.NUM_IMAGE_MAPS, *grid)
        assert maps.isfinite().all()
        assert (maps >= 0).all()


def test_lightness_and_red_are_cielab() -> None:
    # L* and a* of sRGB red (255, 0, 0) under D65: 53.24, 80.09; of white: 100, 0
    red = texture(plain(8, 8, (255, 0, 0)))[:, 4, 4]
    assert red[LIGHT] == pytest.approx(0.5324, abs=2e-3)
    assert red[GREEN_RED] == pytest.approx(0.8009, abs=1e-2)
    white = texture(plain(8, 8, (255, 255, 255)))[:, 4, 4]
    assert white[LIGHT] == pytest.approx(1.0, abs=1e-3)
    assert white[GREEN_RED] == pytest.approx(0.0, abs=1e-3)


def test_an_edge_has_a_direction() -> None:
    half = plain(64, 64)
    half[:, 32:] = 20
    found = texture(half)
    assert found[EDGE_X, 32, 32] < -0.1
    assert found[EDGE_Y].abs().max() < 1e-5
    assert torch.allclose(found[EDGE], found[EDGE_X].abs())
    assert texture(plain(64, 64))[[EDGE, TEXT]].abs().max() < 1e-5


def test_strokes_are_text_and_a_rule_or_an_outline_is_not() -> None:
    strokes, rule, outline = (plain(128, 128) for _ in range(3))
    strokes[32:96:6] = 20
    strokes[:, 32:96:6] = 20
    rule[60:62] = 20
    outline[:, 64:] = 20
    likeness = [float(texture(one)[TEXT, 60, 60]) for one in (strokes, rule, outline)]
    assert likeness[0] > 0.5
    assert max(likeness[1:]) < 1e-3


def test_entropy_counts_shades() -> None:
    two = plain(64, 64)
    two[::4] = 20
    assert texture(plain(64, 64))[ENTROPY, 32, 32] < 0.35  # one shade, at most between two bins
    assert texture(two)[ENTROPY, 32, 32] > texture(plain(64, 64))[ENTROPY, 32, 32]


def test_propositional_and_lost_find_the_small_print_on_an_empty_page() -> None:
    page = plain(512, 512)
    text = example("small_print", 0).image
    page[256:384, 256:384] = torch.from_numpy(text[20:148, 40:168].copy())
    found = relevance.image_maps(texture(page), (8, 8))
    for name, number in (("propositional", 0), ("lost", 2)):
        values = found[number]
        inside = values[4:6, 4:6].mean()
        values = values.clone()
        values[3:7, 3:7] = 0  # the neighbourhood of the border
        assert inside > 5 * values.max(), name


def test_the_one_odd_thing_is_salient() -> None:
    dots = plain(256, 256)
    for y in range(8, 256, 32):
        for x in range(8, 256, 32):
            dots[y : y + 12, x : x + 12] = torch.tensor((30, 60, 200), dtype=torch.uint8)
    dots[136:148, 72:84] = torch.tensor((220, 40, 30), dtype=torch.uint8)
    values = relevance.perspectival(texture(dots), (8, 8))
    assert divmod(int(values.argmax()), 8) == (4, 2)
