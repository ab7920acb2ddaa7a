"""A look becomes views: the length of a request is decided in the middle of its life.

takes   a request that stands where its zoomed views go, and what one look at its pictures gave
gives   the same request with its views chosen: a longer prompt for all its choices
owns    the rule for views of the checkpoint, and who chooses
never   decides twice: what was chosen stays, though the request gives way and is computed again
"""

from collections.abc import Callable, Sequence

from saccade.encoder.prompt_layout import extend_layout, insert_zoomed_views
from saccade.lod.choose import choose
from saccade.lod.types import LodParams, RelevanceMaps, ScoredImage, ViewRule, ZoomChoice
from saccade.request import Request, ZoomResult
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Group, pixels_of

Choose = Callable[[Sequence[ScoredImage], int, LodParams, ViewRule], tuple[ZoomChoice, ...]]


class Looking:
    def __init__(self, rule: ViewRule = ViewRule(), chooser: Choose = choose) -> None:
        self._rule = rule
        self._choose = chooser

    def decide(
        self, group: Group, looks: Sequence[RelevanceMaps], limits: Limits, holdings: Holdings
    ) -> ZoomResult:
        """Choose, and lengthen every choice of the request; blocks claimed for more are given back. Raises
        ValueError for looks that make no sense."""
        request = group.request
        zooming = request.zooming
        if zooming is None:
            raise RuntimeError(f"the views of request {request.id} are chosen already")
        pictures = _pictures(request, zooming.placeholders, looks)
        choices = self._choose(pictures, zooming.budget, zooming.params, self._rule)
        chosen = {slot: choice.regions for slot, choice in zip(zooming.placeholders, choices, strict=True)}
        decided = insert_zoomed_views(request, chosen)
        if decided.length > request.max_length:
            raise RuntimeError(
                f"views of request {request.id} were chosen that make it {decided.length} tokens long; it "
                f"claimed {request.max_length}"
            )
        group.zoomed = ZoomResult(
            regions=tuple(chosen.values()),
            gated=tuple(choice.gated for choice in choices),
            more_tokens=decided.length - request.length,
            visual_tokens=sum(choice.spent for choice in choices),
            choices=choices if zooming.preview_only else (),
            looks=tuple(looks) if zooming.preview_only else (),
        )
        _adopt(group, decided, limits, holdings)
        return group.zoomed


def _adopt(group: Group, decided: Request, limits: Limits, holdings: Holdings) -> None:
    """From now on this is the request, and its prompt that of all its choices."""
    holdings.making.gone(group)
    group.layout = extend_layout(group.layout, group.request, decided)
    group.request = decided
    group.pixels = pixels_of(decided, group.layout)
    holdings.making.came(group)
    for choice in group.choices:
        choice.tokens = list(group.layout.tokens)
        choice.limit = limits.end_of(decided)
        choice.known = None  # of its beginning: it was asked for by other tokens
        choice.set_prompt()
        if choice.chain is not None:
            choice.chain.set_spans(group.layout.spans)
        if choice.computed == len(choice.tokens):  # nothing was added: its end is computed again, to sample
            choice.computed -= 1
        if choice.row is not None:
            choice.renewed = True
            holdings.trim(choice)


def _pictures(request: Request, slots: Sequence[int], looks: Sequence[RelevanceMaps]) -> list[ScoredImage]:
    media = {item.placeholder: item for item in request.media}
    return [
        ScoredImage(
            look=look,
            size=(media[slot].view.box[2], media[slot].view.box[3]),
            frame=media[slot].full,
            grid=media[slot].view.token_grid,
        )
        for slot, look in zip(slots, looks, strict=True)
    ]
