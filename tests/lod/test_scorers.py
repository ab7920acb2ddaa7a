"""The question's coupling, as shares over the view's tokens."""

import numpy as np
import pytest
import torch

from saccade.lod.relevance_pass import HostCopy, ImageMapsTransfer, RelevanceSlice, RelevanceTransfer
from saccade.lod.scorers import from_attention, from_head, image_maps, propositional
from saccade.lod.texture import texture
from saccade.lod.types import FINE, Grid, RelevanceMaps


def relevance_maps(
    maps: torch.Tensor, grid: Grid, share: torch.Tensor, strength: torch.Tensor
) -> RelevanceMaps:
    """One target, waited for."""
    one = RelevanceSlice(grid, ImageMapsTransfer(b"", grid, maps), 0, share.numel())
    numbers = torch.cat((share.reshape(-1), strength.reshape(-1)))
    return RelevanceTransfer(HostCopy(numbers), ((one,),)).wait()[0][0]


def test_the_head_is_the_softmax_of_scaled_products() -> None:
    places = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    share, strength = from_head(torch.tensor([2.0, 0.0]), places)
    expected = torch.tensor([2.0 / 2**0.5, 0.0, 0.0])
    assert torch.allclose(share, expected.softmax(0))
    assert strength == pytest.approx(float(expected.logsumexp(0)))


def test_attention_finds_the_token_one_concentrated_head_looks_at() -> None:
    keys = torch.zeros(2, 9, 2, 8)
    keys[:, 5, 0] = 4.0
    queries = torch.zeros(2, 3, 4, 8)
    queries[:, :, 0:2] = 2.0  # both heads of the first group; the others look everywhere alike
    share, _ = from_attention(queries, keys)
    assert int(share.argmax()) == 5
    assert share[5] > 0.99
    assert share.sum() == pytest.approx(1.0)


def test_attention_of_one_token_and_of_none_preferred_is_flat() -> None:
    assert from_attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 1, 4))[0].tolist() == [1.0]
    flat, _ = from_attention(torch.zeros(1, 2, 2, 4), torch.zeros(1, 6, 1, 4))
    assert torch.allclose(flat, torch.full((6,), 1 / 6))


def test_looks_together_are_looks_alone() -> None:
    seeded = torch.Generator().manual_seed(3)
    queries = torch.randn(5, 3, 2, 8, 16, generator=seeded)
    keys = torch.randn(5, 3, 12, 2, 16, generator=seeded)
    questions, places = (torch.randn(*shape, generator=seeded) for shape in ((5, 8), (5, 12, 8)))
    for way, asked, seen in ((from_attention, queries, keys), (from_head, questions, places)):
        shares, strengths = way(asked, seen)
        for i in range(5):
            share, strength = way(asked[i], seen[i])
            assert torch.allclose(shares[i], share, atol=1e-6)
            assert torch.allclose(strengths[i], strength, atol=1e-5)


def test_every_head_asks_the_keys_of_its_group() -> None:
    """Heads follow each other group by group, as attention has them."""
    keys = torch.zeros(1, 6, 2, 4)
    keys[0, 1, 0], keys[0, 4, 1] = 5.0, 5.0
    for head, token in ((0, 1), (1, 1), (2, 4), (3, 4)):
        queries = torch.zeros(1, 1, 4, 4)
        queries[0, 0, head] = 5.0
        assert int(from_attention(queries, keys)[0].argmax()) == token


def test_a_look_has_every_map_in_its_place() -> None:
    page = torch.full((96, 64, 3), 200, dtype=torch.uint8)
    page[::3, ::5] = 0
    share = torch.arange(6.0) / 15
    look = relevance_maps(image_maps(texture(page), (3, 2)), (3, 2), share, torch.tensor(1.5))
    assert look.participatory.flatten().tolist() == pytest.approx(share.tolist())
    assert look.strength == 1.5
    assert look.propositional.shape == look.perspectival.shape == look.lost.shape == (3, 2)
    assert look.propositional.min() > 0


def test_the_fine_map_is_the_texture_at_a_quarter_of_a_token() -> None:
    page = torch.full((96, 64, 3), 200, dtype=torch.uint8)
    page[40:48, 16:24] = (torch.arange(64).view(8, 8, 1) * 37 % 256).to(torch.uint8)
    made = texture(page)
    look = relevance_maps(image_maps(made, (3, 2)), (3, 2), torch.ones(6), torch.tensor(0.0))
    assert look.image_maps.fine is not None
    assert look.image_maps.fine.shape == (3 * FINE, 2 * FINE)
    assert np.allclose(look.image_maps.fine, propositional(made, (3 * FINE, 2 * FINE)).numpy())
    assert divmod(int(look.image_maps.fine.argmax()), 2 * FINE) == (5, 2)  # places of 8 x 8 pixels
