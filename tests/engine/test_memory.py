"""How large a view can be, and what is set aside for it: what a CPU can check of it."""

from dataclasses import replace

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.encoder.encoder_graphs import EncoderGraphs
from saccade.encoder.encoder_runner import EncoderRunner, PartialEncoding
from saccade.engine.memory import largest_grid, partial_view_bytes
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.kernels.cuda_graph import PlainRecorder
from saccade.models.interface import VisionTower
from saccade.models.loader import load_model
from saccade.worker.encoder_warmup import warm_up_encoder
from tests import checkpoints

PROCESSING = Qwen2VLImageProcessor(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=65_536,
    max_pixels=16_777_216,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert vision is not None
    return vision


@pytest.mark.parametrize("size", [(4096, 4096), (9000, 7000), (500, 30_000), (4095, 4097)])
def test_no_view_is_larger_than_the_measured_one(tower: VisionTower, size: tuple[int, int]) -> None:
    rows, columns = largest_grid(tower, [PROCESSING], 1 << 20)
    assert (rows, columns) == (256, 256)
    grid = plain_view(bytes(16), size, PROCESSING).grid
    assert grid[0] * grid[1] <= rows * columns


def test_a_view_that_no_context_could_hold_is_not_measured(tower: VisionTower) -> None:
    rows, columns = largest_grid(tower, [PROCESSING], 1000)
    assert 3900 < rows * columns <= 4000
    assert rows % 2 == columns % 2 == 0
    assert largest_grid(tower, [replace(PROCESSING, max_pixels=1)], 1000) == (2, 2)


def test_partial_views_take_the_budgeted_bytes(tower: VisionTower) -> None:
    grid = (8, 12)
    with torch.inference_mode():
        layout = tower.layout([grid])
        stream = tower.begin(torch.zeros(96, tower.patch_dim), layout)
        stream, levels = tower.carry(stream, layout, 0, tower.depth)
    half = PartialEncoding(tower.depth, stream, tuple(levels))
    taken = half.stream.nbytes + sum(level.nbytes for level in half.levels)
    assert partial_view_bytes(tower, torch.float32, 96) == taken


def test_common_image_sizes_are_captured_before_the_first_request(tower: VisionTower) -> None:
    """With a processor that makes everything small: the sizes of a real one are a chip's business."""
    processing = replace(PROCESSING, min_pixels=1024, max_pixels=16_384)
    graphs = EncoderGraphs(tower, PlainRecorder(), CPU, torch.float32)
    encoder = EncoderRunner(tower, processing, CPU, torch.float32, None, graphs)
    sizes = [(448, 448), (480, 640), (640, 480), (512, 512)]  # two of one grid, two of as many patches
    calls = warm_up_encoder(encoder, processing, 1000, progress=False, sizes=sizes)
    assert calls == 3 * len(sizes)
    grids = {plain_view(bytes(16), size, processing).grid for size in sizes}
    assert len(grids) == 3
    counts = {rows * columns for rows, columns in grids}
    assert len(counts) == 2
    assert {shape.size for shape in graphs.shapes} == counts
    assert len(graphs) == 3 * len(counts)
    assert {shape.views for shape in graphs.shapes} == {1, 2, 4}
    for shape in graphs.shapes:
        found = graphs.find(shape)
        assert found is not None
        assert found.complete
    assert warm_up_encoder(encoder, processing, 1, progress=False) == 0
