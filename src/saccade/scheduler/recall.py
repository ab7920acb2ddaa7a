"""What was chosen about pictures before, and how often the next choice about them is what is expected.

takes   every choice of zoomed views
gives   the likeliest next one about the same pictures with the same wish, and how far it can be relied on
owns    the choices of late, a bounded number of them
never   keeps anything of a picture that was deleted

What a picture says by itself does not change with the question, and often decides alone where to look. So one
choice comes again and again, others between: the one made most often is a better guess than the last.
"""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from saccade.lod.types import LodParams
from saccade.request import Request, View
from saccade.scheduler.sequence import Regions

MOST = 1024  # wishes remembered: those about as many pictures
DIFFERENT = 8  # choices remembered of each
FADE = 0.9  # of its weight that a choice keeps when the next is made: of equals the latest leads
MEMORY = 32  # choices after which an old one has lost 63% of its weight in `luck`
PRIOR = 4  # choices that half a chance to begin with counts for

Wish = tuple[tuple[View, ...], int, LodParams]  # of what, how many tokens, and what else was asked


@dataclass
class Made:
    """A choice, and how often it was made of late."""

    regions: Regions
    weight: float = 0.0


class Recall:
    def __init__(self, luck: float | None = None) -> None:
        """`luck`: to be relied on whatever happens; None: it is learnt."""
        self._luck = luck
        self._made: OrderedDict[Wish, list[Made]] = OrderedDict()  # oldest first; in each the likeliest
        self._seen = self._right = 0.0  # choices that something was expected of, and what it was; fading

    @property
    def luck(self) -> float:
        """How probably a choice is the one expected."""
        if self._luck is not None:
            return self._luck
        return (self._right + PRIOR / 2) / (self._seen + PRIOR)

    def likeliest(self, request: Request) -> Regions | None:
        """What is probably chosen for one who asks the same of the same pictures as others did."""
        wish = _wish(request)
        made = None if wish is None else self._made.get(wish)
        return made[0].regions if made else None

    def learn(self, request: Request, regions: Regions, deleted: Container[bytes]) -> None:
        """What was chosen for a request as it came; `deleted` are contents of its pictures that are gone."""
        wish = _wish(request)
        if wish is None:
            return
        made = self._made.get(wish, [])
        if made:
            fade = 1 - 1 / MEMORY
            self._seen = self._seen * fade + 1
            self._right = self._right * fade + alike(made[0].regions, regions)
        if any(view.content in deleted for view in wish[0]):
            return
        self._made[wish] = _with(made, regions)
        self._made.move_to_end(wish)
        if len(self._made) > MOST:
            self._made.popitem(last=False)

    def forget(self, content: bytes) -> None:
        """A picture is deleted."""
        for wish in [wish for wish in self._made if any(view.content == content for view in wish[0])]:
            del self._made[wish]


def _with(made: list[Made], regions: Regions) -> list[Made]:
    """Choices of one wish, likeliest first, after one more."""
    for one in made:
        one.weight *= FADE
    chosen = next((one for one in made if alike(one.regions, regions)), None)
    if chosen is None:
        chosen = Made(regions)
        made = [*made[: DIFFERENT - 1], chosen]
    chosen.regions = regions
    chosen.weight += 1
    return sorted(made, key=lambda one: -one.weight)


def alike(some: Regions, others: Regions) -> bool:
    """Whether they are the same views; how much each matters is no part of that."""
    return _outlines(some) == _outlines(others)


def _outlines(regions: Regions) -> list[list[object]]:
    return [[(one.box, one.grid) for one in views] for views in regions]


def _wish(request: Request) -> Wish | None:
    zooming = request.zooming
    if zooming is None:
        return None
    media = {item.placeholder: item.view for item in request.media}
    return tuple(media[slot] for slot in zooming.placeholders), zooming.budget, zooming.params
