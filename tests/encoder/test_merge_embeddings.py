"""Visual rows take their features' place, however the sequence is cut into steps."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.encoder.encoder_runner import merge_embeddings
from saccade.request import View
from saccade.step_plan import ScheduledSequence, Span

HIDDEN = 6


def span(start: int, rows: int, columns: int, name: int) -> Span:
    """A view of rows x columns tokens."""
    view = View(
        content=bytes([name]) * 16, box=(0, 0, 8, 8), grid=(2 * rows, 2 * columns), merge=2, processing=b"p"
    )
    return Span(start=start, view=view, key=view.key)


def row(start: int, count: int, spans: Sequence[Span]) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=0,
        slot=0,
        start=start,
        num_tokens=count,
        tokens=(0,) * count,
        positions=np.zeros((3, count), dtype=np.float32),
        spans=tuple(spans),
        sample=False,
        output_position=0,
    )


def features_of(spans: Sequence[Span], levels: int) -> dict[bytes, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        span.key: torch.randn(span.view.tokens, (1 + levels) * HIDDEN, generator=generator) for span in spans
    }


def spliced(
    rows: Sequence[ScheduledSequence], features: dict[bytes, Tensor], levels: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Embeddings after splicing zeros, and the deep levels [D, H] of each visual token."""
    embeds = torch.zeros(sum(part.num_tokens for part in rows), HIDDEN)
    deep = merge_embeddings(embeds, rows, features.__getitem__, levels)
    if deep is None:
        return embeds, {}
    assert deep.levels.shape == (levels, len(deep.index), HIDDEN)
    return embeds, {int(token): deep.levels[:, i] for i, token in enumerate(deep.index)}


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 100])
def test_any_chunking_gives_the_same_embeddings(chunk: int) -> None:
    spans = [span(2, 2, 3, 1), span(8, 1, 2, 2), span(13, 3, 2, 3)]  # the first two touch
    length, levels = 22, 3
    features = features_of(spans, levels)
    expected = torch.zeros(length, (1 + levels) * HIDDEN)
    for part in spans:
        expected[part.start : part.stop] = features[part.key]
    seen: list[Tensor] = []
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        overlapping = [part for part in spans if part.start < start + count and part.stop > start]
        embeds, deep = spliced([row(start, count, overlapping)], features, levels)
        whole = torch.zeros(count, (1 + levels) * HIDDEN)
        whole[:, :HIDDEN] = embeds
        for token, values in deep.items():
            whole[token, HIDDEN:] = values.flatten()
        seen.append(whole)
    assert torch.equal(torch.cat(seen), expected)


def test_rows_of_a_step_are_packed_in_order() -> None:
    first, second = span(0, 1, 2, 1), span(5, 2, 2, 2)
    features = features_of([first, second], 1)
    rows = [row(9, 1, []), row(7, 3, [second]), row(0, 4, [first]), row(4, 1, [])]
    embeds, deep = spliced(rows, features, 1)
    expected = torch.zeros(9, HIDDEN)
    expected[1:3] = features[second.key][2:4, :HIDDEN]  # tokens 7 and 8 of a view at 5 .. 9
    expected[4:6] = features[first.key][:, :HIDDEN]
    assert torch.equal(embeds, expected)
    assert sorted(deep) == [1, 2, 4, 5]
    assert torch.equal(deep[2][0], features[second.key][3, HIDDEN:])


def test_text_embeddings_are_unchanged() -> None:
    embeds = torch.randn(4, HIDDEN)
    before = embeds.clone()
    assert merge_embeddings(embeds, [row(0, 4, [])], features_of([], 2).__getitem__, 2) is None
    assert torch.equal(embeds, before)


def test_a_model_without_deep_levels_gets_none_but_its_rows_are_written() -> None:
    part = span(1, 1, 1, 1)
    features = features_of([part], 0)
    embeds, deep = spliced([row(0, 3, [part])], features, 0)
    assert deep == {}
    assert torch.equal(embeds[1], features[part.key][0])


def test_features_take_the_precision_of_the_embeddings() -> None:
    part = span(0, 1, 2, 1)
    features = features_of([part], 1)
    embeds = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    deep = merge_embeddings(embeds, [row(0, 2, [part])], features.__getitem__, 1)
    assert deep is not None
    assert deep.levels.dtype == torch.bfloat16


def test_features_of_another_shape_are_refused() -> None:
    part = span(0, 2, 2, 1)
    with pytest.raises(ValueError, match=r"\(4, 12\)"):
        spliced([row(0, 4, [part])], {part.key: torch.zeros(3, 12)}, 1)
