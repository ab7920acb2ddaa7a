"""Views half way through the vision tower: how far each is, and what the device has of it so far.

takes   from the scheduler: the layers planned; from the encoder: what a slice of layers gave
gives   where the next slice begins, and what it goes on from
owns    the bound on the patches of such views; the order in which they were last carried on
never   looks into what it keeps, which may be tensors of any device; decides who goes on

The scheduler plans a slice (`advance`, or `finish` for the last), then the encoder runs it: `take`s what the
slice before it left and, unless it was the last, `keep`s what it leaves itself. Dropping a view frees what is
kept of it at once: whatever a step in flight still reads, the device reads before anything later overwrites.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SEGMENTS = 9  # of a tower's layers, about: what a view can be cut into and each piece still be captured


def segment_layers(depth: int) -> int:
    """Layers of a stretch."""
    return max(1, depth // SEGMENTS)


@dataclass
class _PartialView(Generic[T]):
    patches: int
    planned: int = 0  # layers computed by the steps planned so far
    state: T | None = None  # after the steps launched so far; None before the first of them


class PartialViews(Generic[T]):
    def __init__(self, room: int) -> None:
        self.room = room  # patches of all together; a single larger view still goes, alone
        self._views: OrderedDict[bytes, _PartialView[T]] = OrderedDict()  # last carried on longest ago first
        self._leaving: dict[bytes, _PartialView[T]] = {}  # their last slice is planned, but not launched yet
        self._patches = 0

    def __len__(self) -> int:
        return len(self._views)

    @property
    def keys(self) -> tuple[bytes, ...]:
        return tuple(self._views)

    @property
    def leaving(self) -> tuple[bytes, ...]:
        return tuple(self._leaving)

    @property
    def patches(self) -> int:
        return self._patches

    def layers(self, key: bytes) -> int:
        """Layers of the view that are planned; 0 for one that is not begun."""
        return self._views[key].planned if key in self._views else 0

    # The scheduler's side

    def advance(self, key: bytes, patches: int, stop: int) -> None:
        """A slice up to layer `stop` is planned, not the last."""
        if stop <= self.layers(key):
            raise RuntimeError(f"view {key.hex()[:12]} is planned up to layer {self.layers(key)}, not {stop}")
        if key not in self._views:
            self._views[key] = _PartialView(patches)
            self._patches += patches
        self._views[key].planned = stop
        self._views.move_to_end(key)

    def finish(self, key: bytes) -> None:
        """The last slice is planned."""
        view = self._views.pop(key)
        self._patches -= view.patches
        self._leaving[key] = view

    def drop(self, key: bytes) -> None:
        """Nobody wants it, or a slice of it has failed. No harm if there is nothing of it."""
        self._leaving.pop(key, None)
        view = self._views.pop(key, None)
        if view is not None:
            self._patches -= view.patches

    # The encoder's side

    def take(self, key: bytes) -> T:
        """What the slice before left; it is the caller's now."""
        view = self._leaving.pop(key, None) or self._views.get(key)
        if view is None or view.state is None:
            raise RuntimeError(f"view {key.hex()[:12]} is to be carried on, but nothing of it is there")
        state, view.state = view.state, None
        return state

    def put_back(self, key: bytes, state: T) -> None:
        """The slice that took it failed, and is to be tried again."""
        view = self._views.get(key)
        if view is None:
            view = self._leaving[key] = _PartialView(0)
        view.state = state

    def keep(self, key: bytes, state: T) -> None:
        """What a slice leaves to the next one."""
        if key not in self._views:
            raise RuntimeError(f"view {key.hex()[:12]} is kept half made, but nobody plans to carry it on")
        self._views[key].state = state

    def check(self) -> None:
        """Raise unless the numbers agree."""
        faults = []
        if self._patches != sum(view.patches for view in self._views.values()):
            faults.append("the patches do not add up")
        if self._patches > self.room and len(self._views) > 1:
            faults.append(f"{len(self._views)} views have {self._patches} patches, with room for {self.room}")
        if any(view.planned < 1 for view in self._views.values()):
            faults.append("a view is there without a layer planned")
        if set(self._leaving) & set(self._views):
            faults.append("a view is both leaving and staying")
        if faults:
            raise RuntimeError("unfinished views: " + "; ".join(faults))
