"""A request becomes the token sequence the model really computes.

takes   a Request: a prompt with one placeholder id per media
gives   its Layout: every placeholder repeated to its view's tokens, where each view stands, the rotary
        positions of every token and the way they continue behind the prompt
never   imports torch; looks at pixels
"""

import numpy as np
from numpy.typing import NDArray

from saccade.errors import InvalidValue
from saccade.plan import Layout, Span
from saccade.request import Media, Request, View


def lay_out(request: Request) -> Layout:
    """Expand the placeholders and place every token on the three rotary axes (time, row, column).

    Text advances all axes by one. A view that begins at position p has time p, rows p + r and columns p + c
    over its token grid; what follows continues at p + the longer side of that grid.
    """
    prompt = request.prompt
    media = _in_prompt_order(request)
    tokens: list[int] = []
    spans: list[Span] = []
    positions = np.empty((3, request.length), dtype=np.float32)
    done, position = 0, 0  # prompt ids consumed; next rotary position
    for item in media:
        position = _place_text(positions, len(tokens), item.slot - done, position)
        tokens += prompt[done : item.slot]
        view = item.view
        spans.append(Span(start=len(tokens), view=view, key=view.key))
        positions[:, len(tokens) : len(tokens) + view.tokens] = _grid_positions(view) + position
        tokens += [prompt[item.slot]] * view.tokens
        position += max(view.token_grid)
        done = item.slot + 1
    position = _place_text(positions, len(tokens), len(prompt) - done, position)
    tokens += prompt[done:]
    return Layout(tokens=tuple(tokens), spans=tuple(spans), positions=positions, delta=position - len(tokens))


def _in_prompt_order(request: Request) -> list[Media]:
    """The media by slot, each checked: a slot of its own inside the prompt, a grid that merges evenly."""
    media = sorted(request.media, key=lambda item: item.slot)
    last = len(request.prompt) - 1
    previous: int | None = None
    for item in media:
        if not 0 <= item.slot <= last:
            raise InvalidValue(
                f"a medium stands at prompt index {item.slot}, but the prompt has indices 0 to {last}; "
                "give one placeholder id per medium",
                param="media",
            )
        if item.slot == previous:
            raise InvalidValue(
                f"two media stand at prompt index {item.slot}; give each its own placeholder id",
                param="media",
            )
        _check_grid(item.view)
        previous = item.slot
    return media


def _check_grid(view: View) -> None:
    rows, columns = view.grid
    if view.merge < 1 or min(rows, columns) < view.merge or rows % view.merge or columns % view.merge:
        raise InvalidValue(
            f"a view has a grid of {rows} x {columns} patches; "
            f"both sides must be positive multiples of {view.merge}",
            param="media",
        )


def _place_text(positions: NDArray[np.float32], start: int, count: int, position: int) -> int:
    """Place `count` text tokens from token `start` on; gives the position behind them."""
    positions[:, start : start + count] = np.arange(position, position + count, dtype=np.float32)
    return position + count


def _grid_positions(view: View) -> NDArray[np.float32]:
    """[3, tokens]: time, row and column of a view's tokens, relative to where it begins."""
    rows, columns = view.token_grid
    relative = np.zeros((3, rows, columns), dtype=np.float32)
    relative[1] = np.arange(rows, dtype=np.float32)[:, None]
    relative[2] = np.arange(columns, dtype=np.float32)
    return relative.reshape(3, -1)
