"""A look becomes views: the length of a request is decided in the middle of its life.

takes   a request that stands where its zoomed views go, and what one look at its pictures gave
gives   the same request with its views chosen: a longer prompt for all its choices
owns    the rule for views of the checkpoint, and who chooses
never   decides twice: what was chosen stays, though the request gives way and is computed again
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from saccade.encoder.prompt_layout import insert_zoomed_views
from saccade.lod.choose import choose
from saccade.lod.types import FINE, Choice, Grid, LodParams, Look, Picture, StillMaps, ViewRule
from saccade.request import Request, ZoomRequest, ZoomResult
from saccade.scheduler import lod_extend as lengthening
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.policy import Limits
from saccade.scheduler.recall import alike
from saccade.scheduler.sequence import Group

Choose = Callable[[Sequence[Picture], int, LodParams, ViewRule], tuple[Choice, ...]]


class Looking:
    def __init__(self, rule: ViewRule = ViewRule(), chooser: Choose = choose) -> None:
        self._rule = rule
        self._choose = chooser
        # Of what was chosen for last: sizes, and what was asked. Nothing that was seen.
        self._last: tuple[tuple[tuple[int, int], Grid, Grid], ZoomRequest] | None = None

    def rehearse(self) -> None:
        """Choose as if for a picture like the last one, and drop it. Half of what a choice takes after a
        pause is its code and tables coming out of memory; while a look is on its way there is time for
        that."""
        if self._last is not None:
            sizes, zooming = self._last
            self._choose([_made_up(*sizes)], zooming.budget, zooming.params, self._rule)

    def decide(self, group: Group, looks: Sequence[Look], limits: Limits, holdings: Holdings) -> ZoomResult:
        """Choose, and lengthen every choice of the request, unless that is what was guessed; blocks claimed
        for more are given back. Raises ValueError for looks that make no sense."""
        request, _ = group.asked
        zooming = request.zooming
        if zooming is None:
            raise RuntimeError(f"the views of request {request.id} are chosen already")
        pictures = _pictures(request, zooming.placeholders, looks)
        choices = self._choose(pictures, zooming.budget, zooming.params, self._rule)
        if pictures:
            self._last = (pictures[0].size, pictures[0].frame, pictures[0].grid), zooming
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
            choices=choices if zooming.only_look else (),
            looks=tuple(looks) if zooming.only_look else (),
        )
        if group.guess and group.guess.open and alike(group.guess.regions, group.zoomed.regions):
            lengthening.keep(group, holdings)
            return group.zoomed
        settle = lengthening.correct if group.guessing else lengthening.decide
        settle(group, decided, limits, holdings)
        return group.zoomed


@lru_cache(maxsize=16)
def _made_up(size: tuple[int, int], frame: Grid, grid: Grid) -> Picture:
    """A picture nobody has sent, with something to see here and there."""
    rng = np.random.default_rng(0)
    maps = [rng.random(grid, np.float32) ** 3 for _ in range(4)]
    fine = rng.random((grid[0] * FINE, grid[1] * FINE), np.float32) ** 3
    still = StillMaps(propositional=maps[0], perspectival=maps[1], lost=maps[2], fine=fine)
    return Picture(look=Look(still=still, participatory=maps[3]), size=size, frame=frame, grid=grid)


def _pictures(request: Request, slots: Sequence[int], looks: Sequence[Look]) -> list[Picture]:
    media = {item.placeholder: item for item in request.media}
    return [
        Picture(
            look=look,
            size=(media[slot].view.box[2], media[slot].view.box[3]),
            frame=media[slot].full,
            grid=media[slot].view.token_grid,
        )
        for slot, look in zip(slots, looks, strict=True)
    ]
