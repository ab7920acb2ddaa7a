"""Merges visual features into the token embeddings, in place of the placeholders.

An eager step packs the features of its visual tokens. A captured step reads them from a static buffer with a
row per token, zero where the token is text. Neither waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.models.interface import DeepStackFeatures
from saccade.step_plan import ScheduledSequence, Span


class VisualSlice(NamedTuple):
    """The tokens of a view that a row computes."""

    span: Span
    first: int  # token of the view
    length: int
    position: int  # of the first among all tokens of the rows


def visual_slices(rows: Sequence[ScheduledSequence]) -> Iterator[VisualSlice]:
    offset = 0
    for row in rows:
        for span in row.spans:
            start = max(span.start, row.start)
            stop = min(span.stop, row.start + row.num_tokens)
            if start < stop:
                yield VisualSlice(span, start - span.start, stop - start, offset + start - row.start)
        offset += row.num_tokens


def merge_embeddings(
    embeds: Tensor, rows: Sequence[ScheduledSequence], features: Callable[[bytes], Tensor], depth_levels: int
) -> DeepStackFeatures | None:
    """Write the visual tokens' embeddings into `embeds` [T, H]; gives their deeper (DeepStack) levels, if
    any.

    The T tokens are those of `rows` in order. `features(key)` is [view.tokens, (1 + depth_levels) * H]. A row
    may begin and end inside a view.
    """
    width = (1 + depth_levels) * embeds.shape[1]
    slices = list(visual_slices(rows))
    if not slices:
        return None
    pieces = [_slice_of(features(one.span.key), one, width) for one in slices]
    index = np.concatenate([np.arange(one.position, one.position + one.length) for one in slices])
    on_device = _upload(index.astype(np.int64), embeds.device)
    visual = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(embeds.dtype)
    embeds.index_copy_(0, on_device, visual[:, : embeds.shape[1]])
    return _deep_levels(visual, embeds.shape[1], on_device)


def fill_visual_buffer(
    buffer: Tensor, rows: Sequence[ScheduledSequence], features: Callable[[bytes], Tensor]
) -> None:
    """Copy the visual tokens' features into a static buffer [tokens, (1 + depth_levels) * H]. Text tokens get
    zeros, since deeper levels are added to all tokens."""
    buffer.zero_()
    slices = list(visual_slices(rows))
    targets = [buffer[one.position : one.position + one.length] for one in slices]
    # One launch for all: a question may have eight zoomed views.
    torch._foreach_copy_(targets, [_slice_of(features(one.span.key), one, buffer.shape[1]) for one in slices])


def merge_visual_buffer(
    embeds: Tensor, buffer: Tensor, is_visual: Tensor, index: Tensor
) -> DeepStackFeatures | None:
    """The same for a captured step: `index` [tokens] are the buffer's tokens among those of `embeds` [T, H],
    the last ones; `is_visual` [tokens] masks the visual ones."""
    hidden = embeds.shape[1]
    tail = embeds[embeds.shape[0] - buffer.shape[0] :]
    torch.where(is_visual[:, None], buffer[:, :hidden], tail, out=tail)
    return _deep_levels(buffer, hidden, index)


def _slice_of(features: Tensor, one: VisualSlice, width: int) -> Tensor:
    expected = (one.span.view.tokens, width)
    if tuple(features.shape) != expected:
        raise ValueError(f"features of a view have shape {tuple(features.shape)}; its tokens need {expected}")
    return features[one.first : one.first + one.length]


def _deep_levels(visual: Tensor, hidden: int, index: Tensor) -> DeepStackFeatures | None:
    """[n, (1 + D) * H] -> [D, n, H], a view: each level is read once, so packing it gains nothing."""
    if visual.shape[1] == hidden:
        return None
    levels = visual[:, hidden:].view(len(visual), -1, hidden).transpose(0, 1)
    return DeepStackFeatures(index=index, levels=levels)


def _upload(values: NDArray[np.int64], device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
