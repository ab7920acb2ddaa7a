"""A request whose pictures stand at full detail becomes one that sees them as was asked.

takes   a Request with plain views, what was asked of detail, what the checkpoint can be given
gives   the Request with first views in their place; with zoomed ones where the caller chose them, else with
        what the engine needs to choose them
never   looks at pixels
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from saccade.encoder.prompt_layout import insert_zoomed_views
from saccade.errors import InvalidValue
from saccade.inputs.image_processor import ImageProcessor, global_view
from saccade.lod.checkpoint_views import CheckpointViews
from saccade.lod.detail import Sights, Wishes, check_zoom, sights
from saccade.lod.types import Grid, LodParams
from saccade.request import Media, Request, ZoomRequest


@dataclass(frozen=True)
class Marks:
    """Ids that matter to where views go."""

    image: int | None  # the placeholder
    before: tuple[int, ...]  # ids around a view
    after: tuple[int, ...]
    ends: Collection[int]  # of turns


@dataclass(frozen=True)
class Eye:
    """How one checkpoint sees pictures."""

    views: CheckpointViews
    processing: ImageProcessor
    marks: Marks

    def cost(self, sizes: Sequence[tuple[int, int]], wishes: Wishes) -> int:
        """Tokens that pictures of these sizes (width, height) take at most, with ids around zoomed ones."""
        framing = len(self.marks.before) + len(self.marks.after)
        given = [region for regions in wishes.zooms or () for region in regions]
        chosen = sum(region.tokens + framing for region in given)
        return self._sights(sizes, wishes).most_tokens(framing) + chosen

    def see(self, request: Request, wishes: Wishes) -> Request:
        pictures = [item for item in request.media if request.prompt[item.placeholder] == self.marks.image]
        if not pictures:
            refuse_in_vain(wishes)
            return request
        seen = self._sights([(item.view.box[2], item.view.box[3]) for item in pictures], wishes)
        first = {
            item.placeholder: _first(item, grid) for item, grid in zip(pictures, seen.grids, strict=True)
        }
        media = tuple(first.get(item.placeholder, item) for item in request.media)
        plain = all(item.full_grid is None for item in media) and wishes.zooms is None
        request = msgspec.structs.replace(
            request, media=media, registered=self.views.registered and not plain
        )
        if wishes.zooms is not None:
            return self._given(request, wishes, pictures)
        free = dict(zip((item.placeholder for item in pictures), seen.zoomable, strict=True))
        budget = seen.budget
        if wishes.only_look:  # maps of all pictures are wanted, those seen in full included
            budget += sum(item.view.tokens for item in media if not free.get(item.placeholder, True))
            free = dict.fromkeys(free, True)
        if not any(free.values()):
            return request
        zooming = ZoomRequest(
            params=wishes.params or LodParams(),
            placeholders=tuple(slot for slot, may in free.items() if may),
            budget=budget,
            most_views=seen.most_views,
            at=_after_question(request, self.marks.ends),
            before=self.marks.before,
            after=self.marks.after,
            only_look=wishes.only_look,
        )
        return msgspec.structs.replace(request, zooming=zooming)

    def _sights(self, sizes: Sequence[tuple[int, int]], wishes: Wishes) -> Sights:
        return _seen(tuple(self.processing.token_grid(*size) for size in sizes), wishes, self.views)

    def _given(self, request: Request, wishes: Wishes, pictures: Sequence[Media]) -> Request:
        """With the zoomed views the caller chose."""
        chosen = {
            item.placeholder: regions for item, regions in zip(pictures, wishes.zooms or (), strict=True)
        }
        for item in pictures:
            for region in chosen[item.placeholder]:
                check_zoom(region, (item.view.box[2], item.view.box[3]))
        place = ZoomRequest(
            params=LodParams(),
            placeholders=tuple(chosen),
            budget=0,
            most_views=sum(map(len, chosen.values())),
            at=_after_question(request, self.marks.ends),
            before=self.marks.before,
            after=self.marks.after,
        )
        return insert_zoomed_views(msgspec.structs.replace(request, zooming=place), chosen)


@lru_cache(maxsize=256)  # asked twice for a request, and alike for others
def _seen(frames: tuple[Grid, ...], wishes: Wishes, views: CheckpointViews) -> Sights:
    return sights(frames, wishes, views)


def _first(item: Media, grid: tuple[int, int]) -> Media:
    if grid == item.view.token_grid:
        return item
    return msgspec.structs.replace(item, view=global_view(item.view, grid), full_grid=item.view.token_grid)


def _after_question(request: Request, ends: Collection[int]) -> int:
    """The end of the last turn, where that is behind all media; else the end of the prompt."""
    last = max(item.placeholder for item in request.media)
    places = range(len(request.prompt) - 1, last, -1)
    return next((place for place in places if request.prompt[place] in ends), len(request.prompt))


def refuse_in_vain(wishes: Wishes) -> None:
    """What only a picture could fulfil, asked of a request that has none."""
    if wishes.only_look:
        raise InvalidValue("there is no image to look at; send one", param="messages")
    if wishes.visual_tokens is not None or wishes.zooms:
        name = "visual_tokens" if wishes.visual_tokens is not None else "zooms"
        text = f"{name} was given, but the request has no image; send one, or leave it out"
        raise InvalidValue(text, param=name)
