"""Turns a request at full detail into one with the views its detail settings ask for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from saccade.encoder.prompt_layout import insert_zoomed_views
from saccade.errors import InvalidValue
from saccade.inputs.image_processor import ImageProcessor, global_view
from saccade.lod.checkpoint_views import CheckpointViews
from saccade.lod.detail import DetailRequest, FirstViews, check_zoom_region, plan_first_views
from saccade.lod.types import LodParams
from saccade.request import Media, Request, ZoomRequest


@dataclass(frozen=True)
class PlaceholderIds:
    """Token ids that decide where views are inserted."""

    image: int | None  # the placeholder
    before: tuple[int, ...]  # ids around a view
    after: tuple[int, ...]
    ends: Collection[int]  # ends of a chat turn


@dataclass(frozen=True)
class ViewPlanner:
    """Plans the views of a request for one checkpoint."""

    views: CheckpointViews
    processing: ImageProcessor
    ids: PlaceholderIds

    def cost(self, sizes: Sequence[tuple[int, int]], detail_req: DetailRequest) -> int:
        """Upper bound on the tokens of images of these sizes (width, height), framing ids included."""
        framing = len(self.ids.before) + len(self.ids.after)
        given = [region for regions in detail_req.zooms or () for region in regions]
        chosen = sum(region.tokens + framing for region in given)
        return self._plan(sizes, detail_req).most_tokens(framing) + chosen

    def apply(self, request: Request, detail_req: DetailRequest) -> Request:
        images = [item for item in request.media if request.prompt[item.placeholder] == self.ids.image]
        if not images:
            reject_without_images(detail_req)
            return request
        seen = self._plan([(item.view.box[2], item.view.box[3]) for item in images], detail_req)
        first = {item.placeholder: _first(item, grid) for item, grid in zip(images, seen.grids, strict=True)}
        media = tuple(first.get(item.placeholder, item) for item in request.media)
        plain = all(item.full_grid is None for item in media) and detail_req.zooms is None
        request = msgspec.structs.replace(
            request, media=media, registered=self.views.registered and not plain
        )
        if detail_req.zooms is not None:
            return self._given(request, detail_req, images)
        free = dict(zip((item.placeholder for item in images), seen.zoomable, strict=True))
        budget = seen.budget
        if detail_req.preview_only:  # a preview returns maps of every image, also of those at full detail
            budget += sum(item.view.tokens for item in media if not free.get(item.placeholder, True))
            free = dict.fromkeys(free, True)
        if not any(free.values()):
            return request
        zooming = ZoomRequest(
            params=detail_req.params or LodParams(),
            placeholders=tuple(slot for slot, may in free.items() if may),
            budget=budget,
            most_views=seen.most_views,
            at=_after_question(request, self.ids.ends),
            before=self.ids.before,
            after=self.ids.after,
            preview_only=detail_req.preview_only,
        )
        return msgspec.structs.replace(request, zooming=zooming)

    def _plan(self, sizes: Sequence[tuple[int, int]], detail_req: DetailRequest) -> FirstViews:
        frames = tuple(self.processing.token_grid(*size) for size in sizes)
        return plan_first_views(frames, detail_req, self.views)

    def _given(self, request: Request, detail_req: DetailRequest, images: Sequence[Media]) -> Request:
        """Insert the zoomed views that the caller chose."""
        chosen = {
            item.placeholder: regions for item, regions in zip(images, detail_req.zooms or (), strict=True)
        }
        for item in images:
            for region in chosen[item.placeholder]:
                check_zoom_region(region, (item.view.box[2], item.view.box[3]))
        place = ZoomRequest(
            params=LodParams(),
            placeholders=tuple(chosen),
            budget=0,
            most_views=sum(map(len, chosen.values())),
            at=_after_question(request, self.ids.ends),
            before=self.ids.before,
            after=self.ids.after,
        )
        return insert_zoomed_views(msgspec.structs.replace(request, zooming=place), chosen)


def _first(item: Media, grid: tuple[int, int]) -> Media:
    if grid == item.view.token_grid:
        return item
    return msgspec.structs.replace(item, view=global_view(item.view, grid), full_grid=item.view.token_grid)


def _after_question(request: Request, ends: Collection[int]) -> int:
    """Index of the end of the last turn if all media precede it, otherwise the end of the prompt."""
    last = max(item.placeholder for item in request.media)
    places = range(len(request.prompt) - 1, last, -1)
    return next((place for place in places if request.prompt[place] in ends), len(request.prompt))


def reject_without_images(detail_req: DetailRequest) -> None:
    """Reject detail settings that need an image in a request without one."""
    if detail_req.preview_only:
        raise InvalidValue("there is no image to look at; send one", param="messages")
    if detail_req.visual_tokens is not None or detail_req.zooms:
        name = "visual_tokens" if detail_req.visual_tokens is not None else "zooms"
        text = f"{name} was given, but the request has no image; send one, or leave it out"
        raise InvalidValue(text, param=name)
