"""A batch with views is what the engine would compute: its tokens, their positions, its pixels."""

from random import Random

import numpy as np
import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.encoder.prompt_layout import insert_zoomed_views, lay_out_prompt
from saccade.lod.allocate import SCALES
from saccade.lod.checkpoint_views import read_views
from saccade.lod.detail import plan_global_view
from saccade.lod.types import LodParams, Region
from saccade.request import Media, Request, View, ZoomRequest
from saccade.tools.evaluation.resize import least_tokens
from tests.encoder.make_patches import patches
from training.data import Spec, build
from training.raster import Painter
from training.scenes.generate import KINDS as SCENE_KINDS
from training.scenes.generate import make_scene
from training.scenes.words import TRAIN
from training.sketch import plan_views
from training.steps import to_batch
from training.tokens import IMAGE_PAD, MIDDLE, START, VISION_END, VISION_START
from training.views import RULE, first_look, frame_of

CHECKPOINT = open_checkpoint("embedded")
IMAGE = CHECKPOINT.image
assert IMAGE is not None
KINDS = {"receipt": 1.0, "table": 1.0, "bars": 1.0, "signs": 1.0}


def spec_of(seed: int) -> Spec:
    return plan_views(1 << 14, 0.9, KINDS, Random(seed), toy=True)


def test_first_looks_are_the_engines() -> None:
    assert IMAGE is not None
    assert read_views(CHECKPOINT.config, IMAGE.factor).rule == RULE
    for width, height in ((405, 331), (448, 448), (1344, 896)):
        frame = frame_of(width, height)
        assert frame == IMAGE.token_grid(width, height)
        budget = max(frame[0] * frame[1] // 4, least_tokens(IMAGE))
        grid, left = first_look(width, height, 0.25)
        assert grid == plan_global_view(frame, LodParams(budget=budget), RULE).grid
        assert left == budget - grid[0] * grid[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_branch_is_laid_out_as_the_engine_lays_it_out(seed: int) -> None:
    spec = spec_of(seed)
    data = build(spec, seed)
    per = spec.zoom[0] * spec.zoom[1] // 1024
    compared = 0
    for row in range(spec.batch):
        for number in np.flatnonzero(data["task"][row] >= 0):
            (places,) = np.nonzero(data["branch"][row] == number)
            ids, visual = data["ids"][row, places], data["visual"][row, places]
            zooms = [int(visual[i]) // per for i in np.flatnonzero((visual >= 0) & (visual % per == 0))]
            question = ids[: list(ids).index(VISION_START) if zooms else list(ids).index(MIDDLE[0])]
            layout = lay_out_prompt(
                engine_request(spec, question.tolist(), [data["crops"][row, i] for i in zooms])
            )
            ours = np.where(visual >= 0, IMAGE_PAD, ids)
            prefix = data["place"].shape[1]
            shared = len(layout.tokens) - prefix
            assert layout.tokens[prefix:] == tuple(ours[:shared])
            both = np.concatenate([data["place"], data["positions"][:, row, places[:shared]]], 1)
            np.testing.assert_allclose(layout.positions, both, atol=1e-4)
            compared += bool(zooms)
    assert compared


def engine_request(spec: Spec, question: list[int], crops: list[np.ndarray]) -> Request:
    look = spec.look[1] // 16, spec.look[0] // 16
    whole = View(b"0" * 16, (0, 0, spec.width, spec.height), look, 2, b"")
    prompt = (*START, IMAGE_PAD, *question, *MIDDLE)
    at = len(START) + 1 + len(question)
    zooming = ZoomRequest(
        params=LodParams(),
        placeholders=(len(START),),
        budget=999,
        most_views=4,
        at=at,
        before=(VISION_START,),
        after=(VISION_END,),
    )
    media = Media(len(START), whole, np.empty(0, np.uint8), frame_of(spec.width, spec.height))
    request = Request(id="0", prompt=prompt, media=(media,), registered=True, zooming=zooming)
    grid = spec.zoom[1] // 32, spec.zoom[0] // 32
    boxes = [(int(x), int(y), int(x + w), int(y + h)) for x, y, w, h in crops]
    return insert_zoomed_views(request, {len(START): [Region(box, grid, 1.0) for box in boxes]})


@pytest.mark.parametrize("seed", range(3))
def test_windows_have_the_pixels_of_the_engines(seed: int) -> None:
    assert IMAGE is not None
    spec = spec_of(seed)
    arrays = build(spec, seed)
    data = {name: torch.from_numpy(array) for name, array in arrays.items()}
    painter = Painter(torch.device("cpu"))
    sources = painter(data["rows"], data["counts"], data["ground"], spec.width, spec.height)
    crops = to_batch(spec, data, painter).crops
    assert crops is not None
    grid = spec.zoom[1] // 16, spec.zoom[0] // 16
    scales = set()
    for row, i in np.ndindex(*arrays["crops"].shape[:2]):
        x, y, wide, high = (int(v) for v in arrays["crops"][row, i])
        view = View(b"0" * 16, (x, y, x + wide, y + high), grid, 2, b"")
        theirs = patches(sources[row : row + 1], view, IMAGE).view(-1, 3, 2, 16, 16)[:, :, 0]
        shown = crops[row, i].view(grid[0] // 2, 2, 16, grid[1] // 2, 2, 16, 3).permute(0, 3, 1, 4, 6, 2, 5)
        ours = shown.reshape(-1, 3, 16, 16).float() / 127.5 - 1
        assert (ours - theirs).abs().max() < 2.1 / 127.5  # two passes, each rounded there
        scales.add(round(wide / spec.zoom[0], 1))
    assert scales & {times for times, _ in SCALES}


def test_evidence_has_parts_that_sum_to_one() -> None:
    for kind in SCENE_KINDS:
        scene = make_scene(kind, TRAIN, 512, 512, 0.8, 7)
        for ask in scene.asks:
            assert bool(ask.parts) == (ask.box is not None)
            assert not ask.parts or abs(sum(share for _, share in ask.parts) - 1) < 1e-9
