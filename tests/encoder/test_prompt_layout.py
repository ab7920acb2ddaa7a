"""Layouts against transformers' own positions, and what a layout must refuse."""

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from saccade.encoder.prompt_layout import insert_zoomed_views, lay_out_prompt
from saccade.errors import InvalidValue
from saccade.lod.types import LodParams, Region
from saccade.request import Media, Request, View, ZoomRequest
from saccade.step_plan import PromptLayout

MERGE = 2
IMAGE_PAD, VIDEO_PAD = 90, 91


def media(slot: int, rows: int, columns: int, content: bytes = b"c" * 16) -> Media:
    """A medium of rows x columns tokens."""
    view = View(
        content=content, box=(0, 0, 8, 8), grid=(rows * MERGE, columns * MERGE), merge=MERGE, processing=b"p"
    )
    return Media(placeholder=slot, view=view, pixels=np.zeros((1, 8, 8, 3), dtype=np.uint8))


def request(prompt: tuple[int, ...], *items: Media) -> Request:
    return Request(id="r", prompt=prompt, media=items)


@pytest.fixture(scope="module")
def oracle() -> Qwen3VLModel:
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 100,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "spatial_merge_size": MERGE,
    }
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


def reference(
    oracle: Qwen3VLModel, layout: PromptLayout, grids: dict[int, list[list[int]]]
) -> tuple[torch.Tensor, int]:
    """transformers' positions and delta for the expanded prompt; video grids as [frames, height, width]."""
    ids = torch.tensor([layout.tokens])
    types = (ids == IMAGE_PAD).int() + 2 * (ids == VIDEO_PAD).int()
    positions, delta = oracle.get_rope_index(
        ids,
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor(grids[IMAGE_PAD]) if grids[IMAGE_PAD] else None,
        video_grid_thw=torch.tensor(grids[VIDEO_PAD]) if grids[VIDEO_PAD] else None,
    )
    return positions[:, 0], int(delta)


@pytest.mark.parametrize("seed", range(20))
def test_positions_and_delta_are_those_of_transformers(oracle: Qwen3VLModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt: list[int] = []
    items: list[Media] = []
    grids: dict[int, list[list[int]]] = {IMAGE_PAD: [], VIDEO_PAD: []}

    def text(least: int) -> None:
        prompt.extend(int(token) for token in rng.integers(1, 80, rng.integers(least, 9)))

    text(0)
    for _ in range(int(rng.integers(0, 5))):
        kind = int(rng.choice([IMAGE_PAD, VIDEO_PAD]))
        frames = int(rng.integers(1, 4)) if kind == VIDEO_PAD else 1
        rows, columns = (int(side) for side in rng.integers(1, 7, 2))
        grids[kind].append([frames, rows * MERGE, columns * MERGE])
        for _ in range(frames):  # text (a timestamp) stands between the frames of a video
            items.append(media(len(prompt), rows, columns))
            prompt.append(kind)
            text(1)
    if not prompt:
        text(1)
    layout = lay_out_prompt(request(tuple(prompt), *items))
    positions, delta = reference(oracle, layout, grids)
    assert np.array_equal(layout.positions, positions.numpy())
    assert layout.delta == delta


@pytest.mark.parametrize("after", [0, 1, 60])
@pytest.mark.parametrize("seconds", [0.1, 0.7, 3.0])
def test_positions_of_a_timed_video_are_those_of_transformers(seconds: float, after: int) -> None:
    """Its time may exceed the positions of the text behind it, but not those of the output."""
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text |= {"num_key_value_heads": 1, "vocab_size": 100}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "out_hidden_size": 16, "tokens_per_second": 4}
    oracle = Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    views = [media(2 + frame, 3, 5) for frame in range(4)]
    times = [int(np.float32(frame) * np.float32(4 * seconds)) for frame in range(4)]
    views[1:] = [msgspec.structs.replace(v, time=t) for v, t in zip(views[1:], times[1:], strict=True)]
    still = media(6 + after, 2, 2)
    prompt = (1, 2, *[VIDEO_PAD] * 4, *range(1, 1 + after), IMAGE_PAD)
    layout = lay_out_prompt(request(prompt, *views, still))
    ids = torch.tensor([layout.tokens])
    positions, delta = oracle.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE_PAD).int() + 2 * (ids == VIDEO_PAD).int(),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        video_grid_thw=torch.tensor([[4, 6, 10]]),
        second_per_grid_ts=torch.tensor([seconds]),
    )
    assert np.array_equal(layout.positions, positions[:, 0].numpy())
    assert layout.delta == int(delta)


def test_the_time_of_a_view_is_part_of_its_prefix_key() -> None:
    first, later = media(0, 2, 2), msgspec.structs.replace(media(1, 2, 2), time=3)
    other = msgspec.structs.replace(later, time=4)
    spans = [lay_out_prompt(request((VIDEO_PAD,) * 2, first, one)).spans[1] for one in (later, other)]
    assert spans[0].key == spans[1].key
    assert spans[0].position_key != spans[1].position_key


def test_a_prompt_that_ends_in_an_image_continues_behind_its_longer_side(oracle: Qwen3VLModel) -> None:
    layout = lay_out_prompt(request((5, IMAGE_PAD), media(1, 2, 7)))
    _, delta = reference(oracle, layout, {IMAGE_PAD: [[1, 4, 14]], VIDEO_PAD: []})
    assert layout.delta == delta == (1 + 7) - (1 + 14)


def test_every_placeholder_becomes_its_views_tokens_where_the_span_says() -> None:
    first, second = media(1, 2, 3, b"a" * 16), media(2, 1, 1, b"b" * 16)
    layout = lay_out_prompt(
        request((7, IMAGE_PAD, VIDEO_PAD, 8), second, first)
    )  # the order given does not matter
    assert layout.tokens == (7, *[IMAGE_PAD] * 6, VIDEO_PAD, 8)
    assert [(span.start, span.stop) for span in layout.spans] == [(1, 7), (7, 8)]
    assert [span.key for span in layout.spans] == [first.view.key, second.view.key]
    assert layout.positions.shape == (3, 9)
    assert layout.positions.dtype == np.float32


def test_text_alone_counts_up_on_all_axes() -> None:
    layout = lay_out_prompt(request(tuple(range(10))))
    assert np.array_equal(layout.positions, np.tile(np.arange(10), (3, 1)))
    assert layout.delta == 0
    assert layout.spans == ()


@pytest.mark.parametrize("slot", [-1, 3, 1000])
def test_a_placeholder_outside_the_prompt_is_refused(slot: int) -> None:
    with pytest.raises(InvalidValue, match=f"index {slot}"):
        lay_out_prompt(request((1, 2, 3), media(slot, 1, 1)))


def test_two_media_at_one_placeholder_are_refused() -> None:
    with pytest.raises(InvalidValue, match="two media"):
        lay_out_prompt(request((1, IMAGE_PAD, 3), media(1, 1, 1), media(1, 2, 2)))


@pytest.mark.parametrize("grid", [(3, 2), (2, 5), (0, 2), (2, 0)])
def test_a_grid_that_does_not_merge_evenly_is_refused(grid: tuple[int, int]) -> None:
    view = View(content=b"c" * 16, box=(0, 0, 8, 8), grid=grid, merge=MERGE, processing=b"p")
    item = Media(placeholder=0, view=view, pixels=np.zeros((1, 8, 8, 3), dtype=np.uint8))
    with pytest.raises(InvalidValue, match="multiples of 2"):
        lay_out_prompt(request((IMAGE_PAD,), item))


@pytest.mark.parametrize("registered", [False, True], ids=["stock", "registered"])
@pytest.mark.parametrize("zooms", [0, 1, 3])
@pytest.mark.parametrize("images", [1, 2])
def test_a_layout_is_extended_to_that_of_the_decided_request(
    registered: bool, zooms: int, images: int
) -> None:
    prompt = (5, IMAGE_PAD, 6, IMAGE_PAD, 7, 8, 9)
    slots = (1, 3)[:images]
    items = [
        msgspec.structs.replace(media(slot, 2, 3, bytes([slot] * 16)), full_grid=(6, 9)) for slot in slots
    ]
    place = ZoomRequest(
        params=LodParams(), placeholders=slots, budget=99, most_views=9, at=5, before=(1, 2), after=(3,)
    )
    asked = Request(id="r", prompt=prompt, media=tuple(items), zooming=place, registered=registered)
    regions = [Region((i, i, i + 4, i + 3), (1 + i, 2), 1.0) for i in range(zooms)]
    decided = insert_zoomed_views(asked, dict.fromkeys(slots, regions))
    assert asked.zooming is not None
    found = lay_out_prompt(decided, lay_out_prompt(asked), asked.zooming.at)
    whole = lay_out_prompt(decided)
    assert (found.tokens, found.spans, found.delta) == (whole.tokens, whole.spans, whole.delta)
    assert np.array_equal(found.positions, whole.positions)
