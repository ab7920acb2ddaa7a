"""The vision tower's own promises; its numbers are compared in test_parity."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.models import vit
from saccade.models.interface import Layout
from saccade.models.loader import load_model
from tests import checkpoints
from tests.models.harness import relative_error


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> vit.QwenVision:
    folder: Path = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    if not isinstance(vision, vit.QwenVision):
        raise TypeError(type(vision))
    return vision


def noise(tower: vit.QwenVision, grids: list[tuple[int, int]]) -> torch.Tensor:
    patches = sum(height * width for height, width in grids)
    return torch.randn(patches, tower.patch_dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "grids", [[(4, 4)] * 3, [(4, 6), (6, 4)], [(2, 2), (8, 2), (2, 2)], [(2, 30), (6, 10), (4, 4)]], ids=str
)
def test_packed_views_get_what_they_get_alone(tower: vit.QwenVision, grids: list[tuple[int, int]]) -> None:
    patches = noise(tower, grids)
    together = tower(patches, grids)
    sizes = [height * width for height, width in grids]
    alone = torch.cat(
        [tower(part, [grid]) for part, grid in zip(torch.split(patches, sizes), grids, strict=True)]
    )
    assert relative_error(together, alone) < 1e-5


def test_a_view_of_one_token_works(tower: vit.QwenVision) -> None:
    assert tower(noise(tower, [(2, 2)]), [(2, 2)]).isfinite().all()


def test_grids_that_do_not_fit_are_refused(tower: vit.QwenVision) -> None:
    with pytest.raises(ValueError, match=r"\[16, 1536\].*\(15, 1536\)"):
        tower(torch.zeros(15, tower.patch_dim), [(4, 4)])
    with pytest.raises(ValueError, match="3 x 4 patches does not divide by 2"):
        tower(torch.zeros(12, tower.patch_dim), [(3, 4)])
    with pytest.raises(ValueError, match="need patches"):
        tower(torch.zeros(0, tower.patch_dim), [])


def test_cached_tables_are_bounded_and_evicted_lru(
    tower: vit.QwenVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower, "_tables", OrderedDict())
    monkeypatch.setattr(tower, "_kept", 0)
    monkeypatch.setitem(vit.KEPT_PATCHES, "cpu", 40)
    first, second = tower.tables((4, 4)), tower.tables((4, 6))
    assert tower.tables((4, 4)) is first  # now (4, 6) is the older
    tower.tables((2, 2))
    assert tower.tables((4, 4)) is first
    assert tower.tables((4, 6)) is not second
    huge = tower.tables((20, 20))  # over the bound alone: kept until the next
    assert tower.tables((20, 20)) is huge
    tower.tables((2, 2))
    assert tower.tables((20, 20)) is not huge


def test_a_layout_has_the_tables_of_its_views_one_after_the_other(tower: vit.QwenVision) -> None:
    grids = [(4, 6), (2, 2), (6, 4)]
    layout, alone = tower.layout(grids), [tower.layout([grid]) for grid in grids]
    assert layout.sizes == (24, 4, 24)
    static = Layout(layout.grids, tuple((torch.zeros_like(layout.table(n)),) for n in range(4)))
    static.copy_(layout)
    for number in range(4):
        parts = torch.cat([one.table(number) for one in alone])
        assert torch.equal(layout.table(number), parts)
        assert torch.equal(static.table(number), parts)
