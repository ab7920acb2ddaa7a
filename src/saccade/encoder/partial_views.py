"""Views part-way through the vision tower: the layers planned for each, and its state on the device.

The scheduler plans a slice of layers (`advance`, or `finish` for the last). The encoder runner then runs it:
it takes the state that the slice before left and, unless the slice is the last, keeps a new one. Dropping a
view frees its state at once: a step in flight reads it before anything later overwrites it. Torch-free:
states may be anything.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SEGMENTS = 9  # a view's encoding is split into about as many slices, each with a CUDA graph


def segment_layers(depth: int) -> int:
    """Layers of a segment of a tower."""
    return max(1, depth // SEGMENTS)


@dataclass
class _PartialView(Generic[T]):
    patches: int
    planned: int = 0  # layers computed by the steps planned so far
    state: T | None = None  # after the steps launched so far; None before the first


class PartialViews(Generic[T]):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # patches of all views together; a single larger view is allowed alone
        self.views: OrderedDict[bytes, _PartialView[T]] = OrderedDict()  # least recently advanced first
        self._finishing: dict[bytes, _PartialView[T]] = {}  # the last slice is planned, but not launched yet
        self._patches = 0

    def __len__(self) -> int:
        return len(self.views)

    @property
    def keys(self) -> tuple[bytes, ...]:
        return tuple(self.views)

    @property
    def finishing(self) -> tuple[bytes, ...]:
        return tuple(self._finishing)

    @property
    def patches(self) -> int:
        return self._patches

    def layers(self, key: bytes) -> int:
        """Planned layers of the view; 0 if it has not begun."""
        return self.views[key].planned if key in self.views else 0

    # The scheduler's side

    def advance(self, key: bytes, patches: int, stop: int) -> None:
        """A slice up to layer `stop` is planned, not the last."""
        if stop <= self.layers(key):
            raise RuntimeError(f"view {key.hex()[:12]} is planned up to layer {self.layers(key)}, not {stop}")
        if key not in self.views:
            self.views[key] = _PartialView(patches)
            self._patches += patches
        self.views[key].planned = stop
        self.views.move_to_end(key)

    def finish(self, key: bytes) -> None:
        """The last slice is planned."""
        view = self.views.pop(key)
        self._patches -= view.patches
        self._finishing[key] = view

    def drop(self, key: bytes) -> None:
        """No request wants the view, or a slice failed; no effect on an unknown key."""
        self._finishing.pop(key, None)
        view = self.views.pop(key, None)
        if view is not None:
            self._patches -= view.patches

    # The encoder runner's side

    def take(self, key: bytes) -> T:
        """The state left by the slice before; the caller owns it."""
        view = self._finishing.pop(key, None) or self.views.get(key)
        if view is None or view.state is None:
            raise RuntimeError(f"view {key.hex()[:12]} is to continue, but it has no state")
        state, view.state = view.state, None
        return state

    def put_back(self, key: bytes, state: T) -> None:
        """The slice that took the state failed and is tried again."""
        view = self.views.get(key)
        if view is None:
            view = self._finishing[key] = _PartialView(0)
        view.state = state

    def keep(self, key: bytes, state: T) -> None:
        """Store the state for the next slice."""
        if key not in self.views:
            raise RuntimeError(f"view {key.hex()[:12]} has a state to keep, but no next slice is planned")
        self.views[key].state = state

    def check(self) -> None:
        """Raise unless the numbers agree."""
        faults = []
        if self._patches != sum(view.patches for view in self.views.values()):
            faults.append("the patches do not add up")
        if self._patches > self.capacity and len(self.views) > 1:
            faults.append(f"{len(self.views)} views have {self._patches} patches of {self.capacity}")
        if any(view.planned < 1 for view in self.views.values()):
            faults.append("a view has no planned layer")
        if set(self._finishing) & set(self.views):
            faults.append("a view is finishing and continuing")
        if faults:
            raise RuntimeError("partial views: " + "; ".join(faults))
