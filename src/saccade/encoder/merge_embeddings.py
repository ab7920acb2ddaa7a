"""Visual features take the place of their placeholders' embeddings.

takes   a step's rows, packed one after the other, their token embeddings, and features by view key
gives   the embeddings with every visual row written in place, and the deeper features (DeepStack) of those
never   knows where features are kept; waits for the device
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.models.layers import DeepVisual
from saccade.step_plan import Row, Span


def merge_embeddings(
    embeds: Tensor, rows: Sequence[Row], features: Callable[[bytes], Tensor], depth_levels: int
) -> DeepVisual | None:
    """Write the visual rows of `embeds` [T, H] in place; gives their deeper levels, or None without any.

    The T tokens are those of `rows` in order. A row may begin and end in the middle of a view: only the
    features of the tokens it computes are used. `features(key)` is [view.tokens, (1 + depth_levels) * H].
    """
    hidden = embeds.shape[1]
    pieces: list[Tensor] = []
    places: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for span, first, count, place in visual_slices(rows):
        whole = features(span.key)
        expected = (span.view.tokens, (1 + depth_levels) * hidden)
        if tuple(whole.shape) != expected:
            raise ValueError(
                f"features of a view have shape {tuple(whole.shape)}; its tokens need {expected}"
            )
        pieces.append(whole[first : first + count])
        places.append(np.arange(place, place + count, dtype=np.int64))
    if not pieces:
        return None
    visual = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(embeds.dtype)
    index = _upload(np.concatenate(places), embeds.device)
    embeds.index_copy_(0, index, visual[:, :hidden])
    if not depth_levels:
        return None
    # [Tv, D * H] -> [D, Tv, H], a view: every level is read once, so nothing is gained by packing it
    levels = visual[:, hidden:].view(-1, depth_levels, hidden).transpose(0, 1)
    return DeepVisual(index=index, levels=levels)


def visual_slices(rows: Sequence[Row]) -> Iterator[tuple[Span, int, int, int]]:
    """What rows show of their spans: (span, first token of the view, how many, place among the T tokens)."""
    offset = 0
    for row in rows:
        for span in row.spans:
            start = max(span.start, row.start)
            stop = min(span.stop, row.start + row.count)
            if start < stop:
                yield span, start - span.start, stop - start, offset + start - row.start
        offset += row.count


def _upload(values: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
