"""Which blocks are the vision pool's: against the plainest description."""

from collections.abc import Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.kv_cache.pool_sizing import VISION_SCOPES, VisionBlocks
from saccade.request import Media, Request, View
from saccade.step_plan import Role, Span
from tests.scheduler.simulated_device import picture


def span(start: int, tokens: int, role: Role) -> Span:
    view = View(b"0" * 16, (0, 0, 1, 1), (1, tokens), 1, b"")
    return Span(start, view, view.key, role=role)


pieces = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from(["whole", "global", "zoom"])), max_size=6
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces=pieces, size=st.integers(1, 5), roles=st.sampled_from(sorted(VISION_SCOPES.values(), key=len)))
def test_a_block_is_visual_exactly_if_all_its_tokens_are_of_such_views(
    pieces: list[tuple[int, int, Role]], size: int, roles: Set[Role]
) -> None:
    spans, end = [], 0
    for gap, tokens, role in pieces:
        spans.append(span(end + gap, tokens, role))
        end = spans[-1].stop
    tokens_of = {token for one in spans if one.role in roles for token in range(one.start, one.stop)}
    kinds = VisionBlocks(spans, size, roles)
    blocks = end // size + 3
    visual = [tokens_of.issuperset(range(index * size, (index + 1) * size)) for index in range(blocks)]
    assert [index in kinds for index in range(blocks)] == visual
    for start in range(blocks):
        for stop in range(start, blocks):
            assert kinds.among(start, stop) == sum(visual[start:stop])
    assert kinds.among(2, 1) == 0


@pytest.mark.parametrize(
    ("media", "role"),
    [
        (picture(1, 0, 2, 3), "whole"),
        (picture(1, 0, 2, 3, frame=(2, 3)), "whole"),
        (picture(1, 0, 2, 3, frame=(4, 6)), "global"),
    ],
)
def test_a_picture_at_less_than_full_detail_is_a_global_view(media: Media, role: Role) -> None:
    assert lay_out_prompt(Request(id="r", prompt=(0, 1), media=(media,))).spans[0].role == role


def test_a_part_of_a_picture_is_a_zoomed_view() -> None:
    whole = picture(1, 0)
    part = Media(2, picture(1, 2).view, whole.pixels, origin=0)
    layout = lay_out_prompt(Request(id="r", prompt=(0, 1, 0, 1), media=(whole, part)))
    assert [one.role for one in layout.spans] == ["whole", "zoom"]
