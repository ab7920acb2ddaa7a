"""Level of detail on the host: chooses zoomed views once the relevance of a request's images is known."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from saccade.encoder.prompt_layout import insert_zoomed_views, lay_out_prompt
from saccade.lod.allocate import Field, allocate
from saccade.lod.balance import Balanced, balance, refine, spread
from saccade.lod.types import FINE, LodParams, RelevanceMaps, ScoredImage, ViewRule, ZoomChoice
from saccade.request import Request, ZoomRequest, ZoomResult
from saccade.scheduler.host_decision import Resolution
from saccade.step_plan import PromptLayout, Span

Choose = Callable[[Sequence[ScoredImage], int, LodParams, ViewRule], tuple[ZoomChoice, ...]]
PRICE = (2e-3, 5e-4)  # relevance a token must add: when compressing, when particularising
SHOWN = 0.05  # text that the global view shrinks where the question attends; below it no zoom is needed
SPREAD = 0.65  # entropy of the question's map (balance.spread) above which no region stands out


def choose(
    images: Sequence[ScoredImage], budget: int, params: LodParams, rule: ViewRule
) -> tuple[ZoomChoice, ...]:
    """`budget` includes the global views; the rest is for zoomed views."""
    for image in images:
        _check(image)
    balanced = [balance(one.look, params.scorers, not params.balance) for one in images]
    gated = [_gate(one, found, params) for one, found in zip(images, balanced, strict=True)]
    left = budget - sum(one.grid[0] * one.grid[1] for one in images)
    share = _shares(images)
    fields, prices = [], []
    for one, found, why, part in zip(images, balanced, gated, share, strict=True):
        most = 0 if why else max(1, round(rule.most_views * (0.5 + 0.5 * found.weights.diversify)))
        most = min(most, rule.most_views)
        relevance = refine(found.relevance * np.float32(part), one.look.image_maps.position_in_token)
        fields.append(Field(relevance, one.size, one.frame, most=most))
        prices.append(PRICE[0] + (PRICE[1] - PRICE[0]) * found.weights.particularise)
    regions = allocate(fields, left, rule, min(prices, default=0.0))
    return tuple(
        ZoomChoice(regions=some, gated=why, weights=found.weights, relevance=found.relevance)
        for some, why, found in zip(regions, gated, balanced, strict=True)
    )


def _gate(image: ScoredImage, found: Balanced, params: LodParams) -> str | None:
    """Why the global view suffices, or None."""
    if image.grid[0] * image.grid[1] >= image.frame[0] * image.frame[1]:
        return "the global view is the whole image at full detail"
    if not found.relevance.any():
        return "nothing in the image is relevant"
    if not params.gate or not params.open_ended:
        return None  # a given budget or level is always spent
    asked = "participatory" in params.scorers and image.look.participatory.any()
    lead = image.look.share if asked else found.relevance
    smaller = 1 - math.sqrt(image.grid[0] * image.grid[1] / (image.frame[0] * image.frame[1]))
    lost = smaller * float((lead * image.look.image_maps.writing).sum(dtype=np.float64))
    if lost < SHOWN:
        return f"the global view loses {lost:.2f} of the detail where the question looks, less than {SHOWN}"
    wide = spread(lead) if asked else 0.0  # without a question the map is always spread out
    if wide > SPREAD:
        return f"the question looks everywhere: the spread of its map is {wide:.2f}, above {SPREAD}"
    return None


def _shares(images: Sequence[ScoredImage]) -> list[float]:
    """Share of the request's relevance in each image."""
    if len(images) == 1 and math.isfinite(images[0].look.strength):
        return [1.0]
    strengths = np.array([one.look.strength for one in images], np.float64)
    if not np.isfinite(strengths).all():
        raise ValueError(
            f"the strengths of the relevance maps are {strengths.tolist()}; finite numbers are needed"
        )
    weight = np.exp(strengths - strengths.max(initial=-np.inf))
    return [float(part) for part in weight / weight.sum()]


def _check(image: ScoredImage) -> None:
    look = image.look
    for name in ("propositional", "perspectival", "participatory", "lost"):
        if getattr(look, name).shape != image.grid:
            raise ValueError(
                f"the {name} map is {getattr(look, name).shape}; the view is {image.grid} tokens"
            )
    wanted = (image.grid[0] * FINE, image.grid[1] * FINE)
    fine = look.image_maps.fine
    if fine is not None and fine.shape != wanted:
        raise ValueError(f"the fine map is {fine.shape}; {wanted} are needed")
    if min(*image.size, *image.frame, *image.grid) < 1:
        raise ValueError(f"an image of {image.size}, frame {image.frame}, view {image.grid}: all need 1")


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
            lay_out_prompt(extended, layout, zooming.at),
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
