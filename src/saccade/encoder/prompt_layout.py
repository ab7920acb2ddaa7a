"""Prompt layout: expands image placeholders to visual tokens and assigns rotary positions. Torch-free."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from saccade.errors import InvalidValue
from saccade.lod.types import Region
from saccade.request import NO_PIXELS, Media, Request, View
from saccade.step_plan import PromptLayout, Role, Span

# Marks KV of a full-detail image that also has relevance vectors, which KV of plain requests lacks.
TARGET = b"relevance target"


def lay_out_prompt(request: Request, begun: PromptLayout | None = None, done: int = 0) -> PromptLayout:
    """Expand the placeholders and give every token its positions on three axes (time, row, column).

    Text advances all axes by one. A view that begins at position p has time p, rows p + r and columns p + c
    over its token grid; the next token is at p + the longer side of that grid. A later view of a video may
    have the rows and columns of the first, and a time after it; output tokens follow the highest position.
    With sequential positions visual tokens advance all axes by one, too.

    With registered positions, rows and columns are those of the image's full token grid, its frame: a view
    has the positions of the part it shows, and the next token follows the longer side of the frame. A zoomed
    view that begins at position p has time p and the rows and columns of its part of the earlier frame; the
    next token is at p + 1.

    A prompt whose zoomed views are not chosen yet is laid out up to their insertion point. When they are,
    this continues the layout `begun`, which covers the first `done` ids of the prompt.
    """
    prompt = request.prompt[: request.zooming.at] if request.zooming else request.prompt
    begun = begun or PromptLayout((), (), np.empty((3, 0), np.float32), 0)
    media = _sorted_media(request, len(prompt) - 1)
    known = len(begun.spans)
    targets = request.zooming.placeholders if request.zooming is not None else ()
    wholes: dict[int, tuple[Media, int]] = {}  # by placeholder: whole images and their first positions
    for item, span in zip(media[:known], begun.spans, strict=True):
        _whole_image(item, wholes, int(begun.positions[0, span.start]))
    first = len(begun.tokens)
    tokens, spans = list(begun.tokens), list(begun.spans)
    position = first + begun.delta  # the next
    length = first + len(prompt) - done + sum(item.view.tokens - 1 for item in media[known:])
    positions = np.empty((3, length), dtype=np.float32)
    positions[:, :first] = begun.positions
    for item in media[known:]:
        position = _set_text_positions(positions, len(tokens), item.placeholder - done, position)
        tokens += prompt[done : item.placeholder]
        view = item.view
        whole, begin = _whole_image(item, wholes, position)
        grid, place, following = _media_positions(request, item, whole, begin, position)
        part: Role = "whole" if item.full == view.token_grid else "global"
        role = part if item.origin is None else "zoom"
        is_target = item.placeholder in targets
        if is_target and role == "whole":  # a preview at full detail
            place += TARGET
        spans.append(Span(len(tokens), view, view.key, place, role, is_target or role == "global"))
        positions[:, len(tokens) : len(tokens) + view.tokens] = grid
        tokens += [prompt[item.placeholder]] * view.tokens
        position = following
        done = item.placeholder + 1
    position = _set_text_positions(positions, len(tokens), len(prompt) - done, position)
    tokens += prompt[done:]
    position = max(position, _highest_time(request, positions) + 1)
    return PromptLayout(tuple(tokens), tuple(spans), positions, position - len(tokens))


def _media_positions(
    request: Request, item: Media, whole: Media, begin: int, position: int
) -> tuple[NDArray[np.float32], bytes, int]:
    """A view's positions, what its features' identity adds for them, and the position of the next token.

    `whole` is the whole image the view belongs to, which begins at position `begin`.
    """
    view = item.view
    if request.sequential:
        following = position + view.tokens
        return np.arange(position, following, dtype=np.float32), b"", following
    if request.registered:
        grid = _registered_positions(view, whole) + begin
        grid[0] = position
        place = np.array([begin, *whole.full], dtype="<i8").tobytes()
        return grid, place, position + (max(whole.full) if whole is item else 1)
    if item.time is not None:
        return _later_positions(view, item.time, position), item.time.to_bytes(8, "little"), position
    return _grid_positions(*view.token_grid) + position, b"", position + max(view.token_grid)


def _sorted_media(request: Request, last: int) -> list[Media]:
    """The media by placeholder, validated: distinct placeholders up to `last`, grids that merge evenly."""
    media = sorted(request.media, key=lambda item: item.placeholder)
    previous: int | None = None
    for item in media:
        if not 0 <= item.placeholder <= last:
            raise InvalidValue(
                f"a medium is at prompt index {item.placeholder}, but the prompt has indices 0 to {last}; "
                "give one placeholder id per medium",
                param="media",
            )
        if item.placeholder == previous:
            raise InvalidValue(
                f"two media are at prompt index {item.placeholder}; give each its own placeholder id",
                param="media",
            )
        rows, columns = item.view.grid
        merge = item.view.merge
        if merge < 1 or min(rows, columns) < merge or rows % merge or columns % merge:
            raise InvalidValue(
                f"a view has a grid of {rows} x {columns} patches; "
                f"both sides must be positive multiples of {merge}",
                param="media",
            )
        previous = item.placeholder
    return media


def _whole_image(item: Media, wholes: dict[int, tuple[Media, int]], position: int) -> tuple[Media, int]:
    """The whole image that `item` shows a part of, often itself, and its first position."""
    if item.origin is None:
        wholes[item.placeholder] = item, position
        return item, position
    if item.origin not in wholes:
        raise InvalidValue(
            f"the zoomed view at prompt index {item.placeholder} belongs to one at {item.origin}, where no "
            "whole image precedes it",
            param="media",
        )
    return wholes[item.origin]


def _set_text_positions(positions: NDArray[np.float32], start: int, count: int, position: int) -> int:
    """Set the positions of `count` text tokens from token `start` on; gives the next position."""
    positions[:, start : start + count] = np.arange(position, position + count, dtype=np.float32)
    return position + count


def _later_positions(view: View, time: int, position: int) -> NDArray[np.float32]:
    """[3, tokens]: of a later view of a video, whose views before it end at `position`."""
    grid = _grid_positions(*view.token_grid) + (position - max(view.token_grid))
    grid[0] += time
    return grid


def _highest_time(request: Request, positions: NDArray[np.float32]) -> int:
    """Of a complete prompt with a timed video, whose times may be above the text's positions; else -1."""
    timed = request.zooming is None and any(item.time is not None for item in request.media)
    return int(positions.max()) if timed else -1


def _registered_positions(view: View, whole: Media) -> NDArray[np.float32]:
    """[3, tokens]: the centres of a view's tokens in the frame of its image; times are 0."""
    rows, columns = view.token_grid
    _, _, width, height = whole.view.box
    x0, y0, x1, y1 = view.box
    relative = np.zeros((3, rows, columns), dtype=np.float32)
    relative[1] = ((y0 + (np.arange(rows) + 0.5) * (y1 - y0) / rows) * whole.full[0] / height - 0.5)[:, None]
    relative[2] = (x0 + (np.arange(columns) + 0.5) * (x1 - x0) / columns) * whole.full[1] / width - 0.5
    return relative.reshape(3, -1)


@lru_cache(maxsize=64)  # the largest takes 200 KB
def _grid_positions(rows: int, columns: int) -> NDArray[np.float32]:
    """[3, tokens], read-only: time, row and column of a view's tokens relative to its first position."""
    relative = np.zeros((3, rows, columns), dtype=np.float32)
    relative[1] = np.arange(rows, dtype=np.float32)[:, None]
    relative[2] = np.arange(columns, dtype=np.float32)
    relative.flags.writeable = False
    return relative.reshape(3, -1)


def insert_zoomed_views(request: Request, chosen: Mapping[int, Sequence[Region]]) -> Request:
    """The request with the chosen regions, by placeholder, as zoomed views at the insertion point of its
    prompt."""
    zooming = request.zooming
    if zooming is None:
        raise ValueError(f"request {request.id} has no insertion point for zoomed views")
    wholes = {item.placeholder: item for item in request.media}
    inserted: list[int] = []
    media: list[Media] = []
    for placeholder, regions in sorted(chosen.items()):
        for region in regions:
            inserted += zooming.before
            view = crop_view(wholes[placeholder].view, region)
            media.append(Media(zooming.at + len(inserted), view, NO_PIXELS, origin=placeholder))
            inserted.append(request.prompt[placeholder])
            inserted += zooming.after
    prompt = (*request.prompt[: zooming.at], *inserted, *request.prompt[zooming.at :])
    return msgspec.structs.replace(request, prompt=prompt, media=(*request.media, *media), zooming=None)


def crop_view(view: View, region: Region) -> View:
    """The view of a region of the image that `view` shows whole."""
    rows, columns = region.grid
    grid = rows * view.merge, columns * view.merge
    return View(view.content, region.box, grid, view.merge, view.processing)
