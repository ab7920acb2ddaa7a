"""The encoder packs, splits and normalises as each view asks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.encoder.encoder_graphs import EncoderGraphs, TowerShape
from saccade.encoder.encoder_runner import EncoderRunner, PartialEncoding
from saccade.encoder.partial_views import PartialViews
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.kernels.cuda_graph import PlainRecorder
from saccade.kernels.dispatch import KernelMode
from saccade.models.interface import Layout, VisionTower
from saccade.models.loader import load_model
from saccade.request import Pixels, View
from saccade.step_plan import EncodeTask
from tests import checkpoints
from tests.encoder.make_patches import patches

CPU = torch.device("cpu")
PROCESSING = Qwen2VLImageProcessor(
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=64,
    max_pixels=4096,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)


VIT_PROCESSING = replace(PROCESSING, patch_size=16, min_pixels=1024, max_pixels=1 << 16)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert vision is not None
    assert vision.depth > 3
    return vision


class MeanTower(VisionTower):
    """Features of a token: the mean of its patches, and twice that as a deep level; remembers its calls."""

    patch_dim = 3 * 2 * 4 * 4
    merge = 2
    depth = 4
    hidden_dim = patch_dim
    deep = (1,)
    depth_levels = 1
    out_dim = patch_dim

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[tuple[int, int]]] = []
        self.dtypes: set[torch.dtype] = set()

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        self.calls.append(list(layout.grids))
        self.dtypes.add(patches.dtype)
        return patches

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        levels = []
        for layer in range(first, stop):
            stream = stream * (1 + layer)
            if layer == 1:
                levels.append(2 * self._tokens(stream))
        return stream, levels

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._tokens(stream), *levels], dim=1)

    def _tokens(self, stream: Tensor) -> Tensor:
        return stream.view(-1, self.merge**2, self.patch_dim).mean(dim=1)


def image(seed: int, height: int, width: int, frames: int = 1) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def encode_of(pixels: Pixels, view: View | None = None) -> EncodeTask:
    if view is None:
        content = blake3(pixels.tobytes()).digest(length=16)
        view = plain_view(content, (pixels.shape[2], pixels.shape[1]), PROCESSING)
    return EncodeTask(view=view, key=view.key, pixels=pixels)


def run(encoder: EncoderRunner, encodes: Sequence[EncodeTask]) -> list[Tensor]:
    features = encoder.encode(encodes)
    assert len(features) == len(encodes)
    return [features[encode.key] for encode in encodes]


def expected(encode: EncodeTask, processing: Qwen2VLImageProcessor = PROCESSING) -> Tensor:
    made = patches(torch.from_numpy(encode.pixels), encode.view, processing)
    return MeanTower().forward(made, [encode.view.grid])


def test_each_view_gets_its_own_features_whatever_it_is_packed_with() -> None:
    sizes = [(16, 24), (33, 9), (8, 8), (40, 40)]
    encodes = [encode_of(image(i, *size)) for i, size in enumerate(sizes)]
    encodes.append(encode_of(image(9, 20, 30, frames=2)))
    tower = MeanTower()
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.float32), encodes)
    assert len(tower.calls) == 1
    for encode, feature in zip(encodes, features, strict=True):
        assert feature.shape == (encode.view.tokens, 2 * tower.out_dim)
        assert torch.equal(feature, expected(encode))


def test_a_call_holds_no_more_patches_than_its_budget_except_one_view_alone() -> None:
    encodes = [encode_of(image(i, 16, 16 * (1 + i % 3))) for i in range(20)]
    encodes.insert(7, encode_of(image(99, 60, 60)))
    tower = MeanTower()
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.float32, patches_per_call=64), encodes)
    grids = [grid for call in tower.calls for grid in call]
    assert sorted(grids) == sorted(encode.view.grid for encode in encodes)
    assert grids == sorted(grids, key=lambda grid: grid[0] * grid[1])  # alike ones together
    for call in tower.calls:
        assert len(call) == 1 or sum(rows * columns for rows, columns in call) <= 64
    assert max(rows * columns for call in tower.calls for rows, columns in call) > 64
    assert all(
        torch.equal(feature, expected(encode)) for encode, feature in zip(encodes, features, strict=True)
    )


def test_features_do_not_keep_their_neighbours_memory() -> None:
    encodes = [encode_of(image(i, 16, 16)) for i in range(5)]
    for feature in run(EncoderRunner(MeanTower(), PROCESSING, CPU, torch.float32), encodes):
        assert feature.untyped_storage().nbytes() == feature.nbytes


def test_two_views_of_one_image_differ_and_a_read_only_array_is_fine() -> None:
    pixels = image(3, 40, 40)
    pixels.setflags(write=False)
    whole = encode_of(pixels)
    corner = encode_of(
        pixels,
        View(content=bytes(16), box=(0, 0, 20, 20), grid=(4, 4), merge=2, processing=PROCESSING.digest),
    )
    features = run(EncoderRunner(MeanTower(), PROCESSING, CPU, torch.float32), [whole, corner])
    copied = encode_of(pixels.copy(), corner.view)
    assert torch.equal(features[1], expected(copied))
    assert features[0].shape != features[1].shape


def test_a_view_is_processed_as_it_says_and_unknown_processing_is_refused() -> None:
    video = replace(PROCESSING, mean=(0.1, 0.2, 0.3))
    pixels = image(4, 16, 16, frames=2)
    encode = encode_of(pixels, plain_view(bytes(16), (16, 16), video))
    both = EncoderRunner(MeanTower(), (PROCESSING, video), CPU, torch.float32)
    assert torch.equal(run(both, [encode])[0], expected(encode, video))
    with pytest.raises(ValueError, match=encode.view.processing.hex()):
        run(EncoderRunner(MeanTower(), PROCESSING, CPU, torch.float32), [encode])


def test_the_tower_gets_patches_of_its_own_precision() -> None:
    tower = MeanTower()
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.bfloat16), [encode_of(image(5, 16, 16))])
    assert tower.dtypes == {torch.bfloat16}
    assert features[0].dtype == torch.bfloat16


@pytest.mark.parametrize("captured", [False, True])
def test_in_deterministic_mode_every_view_runs_alone(captured: bool) -> None:
    tower = MeanTower()
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32) if captured else None
    encodes = [encode_of(image(i, 16, 24)) for i in range(3)]
    encoder = EncoderRunner(tower, PROCESSING, CPU, torch.float32, None, graphs)
    tower.mode = KernelMode(deterministic=True)
    features = run(encoder, encodes)
    assert [len(call) for call in tower.calls] == [1, 1, 1]
    assert all(torch.equal(one, expected(encode)) for one, encode in zip(features, encodes, strict=True))


@pytest.mark.parametrize(("views", "calls"), [(1, [1]), (2, [1, 1]), (4, [1] * 4), (8, [8]), (5, [5])])
def test_views_without_graphs_of_their_number_use_smaller_graphs(views: int, calls: list[int]) -> None:
    """In up to four parts; beyond, one uncaptured call is better."""
    tower = MeanTower()
    encodes = [encode_of(image(i, 16, 24)) for i in range(views)]
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32)
    graphs.capture(TowerShape(encodes[0].patches, 1))
    tower.calls.clear()
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.float32, None, graphs), encodes)
    assert [len(call) for call in tower.calls] == calls
    assert all(torch.equal(one, expected(encode)) for one, encode in zip(features, encodes, strict=True))
    graphs.check()


def test_views_of_equal_patches_share_a_call_whatever_their_grids(tower: VisionTower) -> None:
    """Nine of four grids of 24 patches and two of 16: calls of sixteen, seven of them blank, and two."""
    grids = [(4, 6), (6, 4), (2, 12), (4, 4), (12, 2), (6, 4), (4, 4), (4, 6), (2, 12), (12, 2), (4, 6)]
    pixels = image(1, 90, 90)
    box = (0, 0, 90, 90)
    views = [View(bytes([i] * 16), box, grid, 2, VIT_PROCESSING.digest) for i, grid in enumerate(grids)]
    encodes = [encode_of(pixels, view) for view in views]
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32, min_uses=1)
    together = run(EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32, None, graphs), encodes)
    assert set(graphs.shapes) == {TowerShape(24, 16), TowerShape(16, 2)}
    plain = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32)
    for encode, feature in zip(encodes, together, strict=True):
        assert torch.allclose(feature, run(plain, [encode])[0], atol=1e-5, rtol=1e-5)
    graphs.check()


@pytest.mark.parametrize(("views", "calls"), [(1, [1]), (3, [4]), (5, [8]), (8, [8]), (9, [16])])
def test_padding_views_make_one_call_of_two(views: int, calls: list[int]) -> None:
    tower = MeanTower()
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32, min_uses=1)
    encoder = EncoderRunner(tower, PROCESSING, CPU, torch.float32, None, graphs)
    for seed in (0, 20):  # what is blank the second time is what lay there the first
        tower.calls.clear()
        encodes = [encode_of(image(seed + i, 16, 24)) for i in range(views)]
        features = run(encoder, encodes)
        assert [len(call) for call in tower.calls] == calls
        assert all(torch.equal(one, expected(encode)) for one, encode in zip(features, encodes, strict=True))
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in features)


def test_a_smaller_graph_is_filled_with_padding_views() -> None:
    """Three go by the graphs for two: two of them, then one and nothing."""
    tower = MeanTower()
    encodes = [encode_of(image(i, 16, 24)) for i in range(3)]
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32)
    graphs.capture(TowerShape(encodes[0].patches, 2))
    tower.calls.clear()
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.float32, None, graphs), encodes)
    assert [len(call) for call in tower.calls] == [2, 2]
    assert all(torch.equal(one, expected(encode)) for one, encode in zip(features, encodes, strict=True))


def test_in_deterministic_mode_a_grid_changes_no_bit_of_another(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each view by the graphs of its size, in any order: the bits of an uncaptured call alone."""
    grids = [(4, 6), (2, 12), (4, 6), (6, 4), (4, 4), (12, 2), (6, 4)]
    pixels = image(2, 60, 90)
    views = [
        View(bytes([i] * 16), (0, 0, 90, 60), grid, 2, VIT_PROCESSING.digest) for i, grid in enumerate(grids)
    ]
    encodes = [encode_of(pixels, view) for view in views]
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32)
    captured = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32, None, graphs)
    plain = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32)
    monkeypatch.setattr(tower, "mode", KernelMode(deterministic=True))
    expected = run(plain, encodes)
    apart = [run(captured, [encode])[0] for encode in encodes]
    together = run(captured, encodes[::-1])[::-1]
    assert set(graphs.shapes) == {TowerShape(24, 1), TowerShape(16, 1)}
    for one, again, feature in zip(apart, together, expected, strict=True):
        assert torch.equal(one, feature)
        assert torch.equal(again, feature)


def test_slices_continue_with_their_own_grids_after_other_views(tower: VisionTower) -> None:
    unfinished: PartialViews[PartialEncoding] = PartialViews(10_000)
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32, min_uses=1)
    encoder = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32, unfinished, graphs)
    plain = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32)
    pixels = image(3, 70, 100)
    encodes = [
        encode_of(pixels, View(bytes([i] * 16), (0, 0, 100, 70), grid, 2, VIT_PROCESSING.digest))
        for i, grid in enumerate([(4, 6), (6, 4), (2, 12)])
    ]
    for _ in range(3):  # captured the first time, replayed then
        for first, stop in ((0, 1), (1, 3)):
            for encode in encodes:
                unfinished.advance(encode.key, encode.patches, stop)
                assert encoder.encode([replace_slice(encode, first, stop)]) == {}
        for encode in encodes:
            unfinished.finish(encode.key)
            (feature,) = run(encoder, [replace_slice(encode, 3, None)])
            assert torch.equal(feature, run(plain, [encode])[0])
    assert graphs.shapes == (TowerShape(24, 1),)


class GridTower(MeanTower):
    """Reads grids otherwise than by tables: a captured call of it is right for one grid alone."""

    by_grid = True

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        super().begin(patches, layout)
        rows = [
            torch.full((size, 1), float(grid[0]))
            for size, grid in zip(layout.sizes, layout.grids, strict=True)
        ]
        return patches * torch.cat(rows)


def test_a_tower_that_reads_grids_itself_has_graphs_of_one_grid_each() -> None:
    grids = [(4, 6), (6, 4), (4, 6), (2, 12)]
    pixels = image(4, 24, 24)
    views = [
        View(bytes([i] * 16), (0, 0, 24, 24), grid, 2, PROCESSING.digest) for i, grid in enumerate(grids)
    ]
    encodes = [encode_of(pixels, view) for view in views]
    tower = GridTower()
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32, min_uses=1)
    features = run(EncoderRunner(tower, PROCESSING, CPU, torch.float32, None, graphs), encodes)
    assert set(graphs.shapes) == {
        TowerShape(24, 2, (4, 6)),
        TowerShape(24, 1, (6, 4)),
        TowerShape(24, 1, (2, 12)),
    }
    for encode, feature in zip(encodes, features, strict=True):
        made = patches(torch.from_numpy(pixels), encode.view, PROCESSING)
        assert torch.equal(feature, GridTower().forward(made, [encode.view.grid]))
    assert graphs.capture(graphs.shape_for((12, 2), 1))
    graphs.check()


def sliced(
    encoder: EncoderRunner, unfinished: PartialViews[PartialEncoding], encode: EncodeTask, ends: Sequence[int]
) -> Tensor:
    """The view's features after slices that end at these layers, planned as the scheduler does it."""
    first = 0
    for stop in ends:
        unfinished.advance(encode.key, encode.patches, stop)
        assert encoder.encode([replace_slice(encode, first, stop)]) == {}
        unfinished.check()
        first = stop
    if first:
        unfinished.finish(encode.key)
    return run(encoder, [replace_slice(encode, first, None)])[0]


def replace_slice(encode: EncodeTask, first: int, stop: int | None) -> EncodeTask:
    return EncodeTask(encode.view, encode.key, encode.pixels, first, stop)


@pytest.mark.parametrize("ends", [[1], [2], [3], [1, 2, 3]])
def test_slices_give_the_same_features_bit_for_bit(ends: list[int], tower: VisionTower) -> None:
    unfinished: PartialViews[PartialEncoding] = PartialViews(10_000)
    encoder = EncoderRunner(tower, VIT_PROCESSING, CPU, torch.float32, unfinished)
    pixels = image(1, 70, 100)
    view = plain_view(bytes(16), (100, 70), VIT_PROCESSING)
    encode = encode_of(pixels, view)
    whole = run(encoder, [encode])[0]
    assert torch.equal(sliced(encoder, unfinished, encode, ends), whole)
    assert not unfinished.keys
    assert not unfinished.finishing


def test_partial_views_continue_together_or_alone() -> None:
    unfinished: PartialViews[PartialEncoding] = PartialViews(10_000)
    tower = MeanTower()
    encoder = EncoderRunner(tower, PROCESSING, CPU, torch.float32, unfinished)
    encodes = [encode_of(image(i, 16, 24)) for i in range(3)]
    for encode in encodes:
        unfinished.advance(encode.key, encode.patches, 2)
    encoder.encode([replace_slice(encode, 0, 2) for encode in encodes])
    unfinished.advance(encodes[2].key, encodes[2].patches, 3)
    for encode in encodes[:2]:
        unfinished.finish(encode.key)
    features = encoder.encode(
        [
            replace_slice(encodes[0], 2, None),
            replace_slice(encodes[1], 2, None),
            replace_slice(encodes[2], 2, 3),
        ]
    )
    unfinished.finish(encodes[2].key)
    features |= encoder.encode([replace_slice(encodes[2], 3, None)])
    assert all(torch.equal(features[encode.key], expected(encode)) for encode in encodes)
    assert not unfinished.keys


class ShortTower(MeanTower):
    """Has memory for so many patches in a call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def carry(self, stream: Tensor, *arguments: Any, **more: Any) -> tuple[Tensor, list[Tensor]]:
        if len(stream) > self.most:
            stream.zero_()  # whatever was done in place is not to be seen in the next attempt
            raise torch.OutOfMemoryError("CUDA out of memory at 0x7f")
        return super().carry(stream, *arguments, **more)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in slices"])
def test_views_that_fail_together_are_encoded_alone_and_failures_are_named(cut: bool, captured: bool) -> None:
    """Four of 24 patches and one of 100, which no call has memory for."""
    tower = ShortTower(10_000 if cut else 60)
    unfinished: PartialViews[PartialEncoding] = PartialViews(10_000)
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32, min_uses=1) if captured else None
    encoder = EncoderRunner(tower, PROCESSING, CPU, torch.float32, unfinished, graphs)
    encodes = [encode_of(image(i, 16, 24)) for i in range(4)]
    large = encode_of(image(9, 40, 40))
    asked = [*encodes, large]
    if cut:
        for encode in asked:
            unfinished.advance(encode.key, encode.patches, 2)
        assert encoder.try_encode([replace_slice(encode, 0, 2) for encode in asked]) == ({}, {})
        tower.most = 60
        unfinished.finish(encodes[0].key)
        unfinished.finish(encodes[1].key)
        for encode in (*encodes[2:], large):
            unfinished.advance(encode.key, encode.patches, 3)
        ends = [None, None, 3, 3, 3]
        asked = [replace_slice(encode, 2, end) for encode, end in zip(asked, ends, strict=True)]
    features, failed = encoder.try_encode(asked)
    assert failed == {large.key: "the device is short of memory"}
    unfinished.drop(large.key)
    if cut:
        for encode in encodes[2:]:
            unfinished.finish(encode.key)
        features |= encoder.encode([replace_slice(encode, 3, None) for encode in encodes[2:]])
    assert features.keys() == {encode.key for encode in encodes}
    assert all(torch.equal(features[encode.key], expected(encode)) for encode in encodes)
    unfinished.check()
    assert not unfinished.keys
    assert not unfinished.finishing


def test_a_slice_that_does_not_follow_the_one_before_is_refused() -> None:
    unfinished: PartialViews[PartialEncoding] = PartialViews(10_000)
    encoder = EncoderRunner(MeanTower(), PROCESSING, CPU, torch.float32, unfinished)
    encode = encode_of(image(1, 16, 24))
    unfinished.advance(encode.key, encode.patches, 1)
    encoder.encode([replace_slice(encode, 0, 1)])
    unfinished.advance(encode.key, encode.patches, 3)
    with pytest.raises(RuntimeError, match="has passed 1 layers; its slice starts at 2"):
        encoder.encode([replace_slice(encode, 2, 3)])


def test_nothing_to_encode_gives_nothing() -> None:
    assert EncoderRunner(MeanTower(), PROCESSING, CPU, torch.float32).encode([]) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_gives_the_same_features() -> None:
    encodes = [encode_of(image(i, 16 + i, 40 - i)) for i in range(6)]
    features = run(EncoderRunner(MeanTower(), PROCESSING, torch.device("cuda"), torch.float32), encodes)
    for encode, feature in zip(encodes, features, strict=True):
        assert torch.allclose(feature.cpu(), expected(encode), atol=1e-6)
