"""Level of detail on the host: chooses zoomed views once the relevance of a request's images is known."""

from collections.abc import Callable, Sequence

from saccade.encoder.prompt_layout import extend_layout, insert_zoomed_views
from saccade.lod.choose import choose
from saccade.lod.types import LodParams, RelevanceMaps, ScoredImage, ViewRule, ZoomChoice
from saccade.request import Request, ZoomRequest, ZoomResult
from saccade.scheduler.host_decision import Resolution
from saccade.step_plan import PromptLayout, Span

Choose = Callable[[Sequence[ScoredImage], int, LodParams, ViewRule], tuple[ZoomChoice, ...]]


class LodController:
    request_field = "zooming"

    def __init__(self, rule: ViewRule = ViewRule(), chooser: Choose = choose) -> None:
        self._rule = rule
        self.chooser = chooser

    def attach(self, request: Request) -> "ZoomDecision | None":
        return None if request.zooming is None else ZoomDecision(self, request.zooming)

    def choose(self, images: Sequence[ScoredImage], zooming: ZoomRequest) -> tuple[ZoomChoice, ...]:
        return self.chooser(images, zooming.budget, zooming.params, self._rule)


class ZoomDecision:
    """The zoomed views of one request, a `HostDecision`."""

    def __init__(self, controller: LodController, zooming: ZoomRequest) -> None:
        self._controller = controller
        self._zooming = zooming

    @property
    def finishes_request(self) -> bool:
        return self._zooming.preview_only

    def probe(self, request: Request, layout: PromptLayout) -> tuple[Span, ...]:
        placeholders = sorted(item.placeholder for item in request.media)  # the order of the spans
        spans = dict(zip(placeholders, layout.spans, strict=True))
        return tuple(spans[placeholder] for placeholder in self._zooming.placeholders)

    def resolve(
        self, request: Request, layout: PromptLayout, relevance: tuple[RelevanceMaps, ...]
    ) -> Resolution:
        """Choose views and append them to the prompt. Raises ValueError for unusable relevance maps."""
        zooming = self._zooming
        choices = self._controller.choose(_scored_images(request, zooming, relevance), zooming)
        regions = {
            placeholder: choice.regions
            for placeholder, choice in zip(zooming.placeholders, choices, strict=True)
        }
        extended = insert_zoomed_views(request, regions)
        if extended.length > request.max_length:
            raise RuntimeError(
                f"the views chosen for request {request.id} make it {extended.length} tokens long; it "
                f"claimed {request.max_length}"
            )
        zoomed = ZoomResult(
            regions=tuple(regions.values()),
            gated=tuple(choice.gated for choice in choices),
            more_tokens=extended.length - request.length,
            visual_tokens=sum(choice.spent for choice in choices),
            choices=choices if zooming.preview_only else (),
            looks=relevance if zooming.preview_only else (),
        )
        return Resolution(
            extended,
            extend_layout(layout, request, extended),
            finish="stop" if zooming.preview_only else None,
            zoomed=zoomed,
        )


def _scored_images(
    request: Request, zooming: ZoomRequest, relevance: Sequence[RelevanceMaps]
) -> list[ScoredImage]:
    media = {item.placeholder: item for item in request.media}
    return [
        ScoredImage(
            look=maps,
            size=(media[placeholder].view.box[2], media[placeholder].view.box[3]),
            frame=media[placeholder].full,
            grid=media[placeholder].view.token_grid,
        )
        for placeholder, maps in zip(zooming.placeholders, relevance, strict=True)
    ]
