"""What was chosen last about pictures, and how often the next choice about them is the same.

takes   every choice of zoomed views
gives   the last one about the same pictures with the same wish, and how far it can be relied on
owns    the last choices, a bounded number of them
never   keeps anything of a picture that was deleted

What a picture says by itself does not change with the question, and often decides alone where to look.
"""

from collections import OrderedDict
from collections.abc import Container

from saccade.lod.values import LodParams
from saccade.request import Request, View
from saccade.schedule.sequence import Regions

MOST = 1024  # choices kept: those of about as many pictures
MEMORY = 32  # choices after which an old one has lost 63% of its weight in `luck`
PRIOR = 4  # choices that half a chance to begin with counts for

Wish = tuple[tuple[View, ...], int, LodParams]  # of what, how many tokens, and what else was asked


class Recall:
    def __init__(self, luck: float | None = None) -> None:
        """`luck`: to be relied on whatever happens; None: it is learnt."""
        self._luck = luck
        self._last: OrderedDict[Wish, Regions] = OrderedDict()  # oldest first
        self._seen = self._same = 0.0  # choices that could be compared, and those alike; fading

    @property
    def luck(self) -> float:
        """How probably a choice is the last one again."""
        if self._luck is not None:
            return self._luck
        return (self._same + PRIOR / 2) / (self._seen + PRIOR)

    def last(self, request: Request) -> Regions | None:
        """What was chosen last for one who asked the same of the same pictures."""
        wish = _wish(request)
        return None if wish is None else self._last.get(wish)

    def learn(self, request: Request, regions: Regions, deleted: Container[bytes]) -> None:
        """What was chosen for a request as it came; `deleted` are contents of its pictures that are gone."""
        wish = _wish(request)
        if wish is None:
            return
        last = self._last.get(wish)
        if last is not None:
            fade = 1 - 1 / MEMORY
            self._seen = self._seen * fade + 1
            self._same = self._same * fade + alike(last, regions)
        if any(view.content in deleted for view in wish[0]):
            return
        self._last[wish] = regions
        self._last.move_to_end(wish)
        if len(self._last) > MOST:
            self._last.popitem(last=False)

    def forget(self, content: bytes) -> None:
        """A picture is deleted."""
        for wish in [wish for wish in self._last if any(view.content == content for view in wish[0])]:
            del self._last[wish]


def alike(some: Regions, others: Regions) -> bool:
    """Whether they are the same views; how much each matters is no part of that."""
    return _outlines(some) == _outlines(others)


def _outlines(regions: Regions) -> list[list[object]]:
    return [[(one.box, one.grid) for one in views] for views in regions]


def _wish(request: Request) -> Wish | None:
    zooming = request.zooming
    if zooming is None:
        return None
    media = {item.slot: item.view for item in request.media}
    return tuple(media[slot] for slot in zooming.slots), zooming.budget, zooming.params
