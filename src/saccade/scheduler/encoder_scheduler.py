"""Views in the making: how much of one a step computes, and who still wants those begun.

takes   the views sequences have come to, and what a step still affords
gives   slices (`Encode`s) to the step: a whole view, or some layers of the tower for it
owns    which requests look at which views; begins, carries on and gives up unfinished ones
never   decides whose turn it is

While answers are streaming a step may take the target's time, so a view's layers are spread over as many
steps as that takes, and who needs the view waits for the last of them. With nobody streaming a view goes in
one step. What is begun stays as long as any request has the view ahead of it, whoever asked for it first.
"""

from collections.abc import Collection, Iterable
from typing import Any

from saccade.encoder.partial_views import PartialViews
from saccade.request import Pixels
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Group
from saccade.scheduler.step_builder import Step
from saccade.step_plan import EncodeTask, Span


class Making:
    def __init__(self, limits: Limits, unfinished: PartialViews[Any] | None) -> None:
        self._limits = limits
        self._unfinished = unfinished if unfinished is not None else PartialViews(limits.max_encode_patches)
        # Requests not ended, by the keys of their views, and the other way round.
        self._viewers: dict[bytes, set[Group]] = {}
        self._views: dict[Group, set[bytes]] = {}
        self._showing: dict[bytes, set[Group]] = {}  # by the contents of their pictures

    def came(self, group: Group) -> None:
        for span in group.layout.spans:
            self._note(group, span)

    def _note(self, group: Group, span: Span) -> None:
        self._viewers.setdefault(span.key, set()).add(group)
        self._views.setdefault(group, set()).add(span.key)
        self._showing.setdefault(span.view.content, set()).add(group)

    def gone(self, group: Group) -> None:
        for key in self._views.pop(group, ()):
            self._viewers[key].discard(group)
            if not self._viewers[key]:
                del self._viewers[key]
        for content in {span.view.content for span in group.layout.spans} & self._showing.keys():
            self._showing[content].discard(group)
            if not self._showing[content]:
                del self._showing[content]

    def deleted(self, content: bytes) -> None:
        """Of a picture: what requests that are here already make of it is theirs alone."""
        for group in self._showing.get(content, ()):
            group.deleted.add(content)

    def carry_on(self, step: Step, group: Group, span: Span, pixels: Pixels, *, must: bool) -> bool:
        """Have the step compute what it affords of a view, something in any case if it `must` and has no view
        yet; gives whether that completes it."""
        key = span.key
        self._note(group, span)  # a request may have got views since it came
        step.asked.setdefault(key, []).append(group)
        if key in step.views:
            return False  # another one waits for it as well: this step does what it can already
        patches = span.view.grid[0] * span.view.grid[1]
        must = must and not step.encodes  # else a huge view never were
        if patches > step.patches_left and not must:
            return False
        done, depth = self._unfinished.layers(key), self._limits.encode_layers
        stop = done + self._affords(step, patches, depth - done, done, must=must)
        if stop == done or (stop < depth and not done and not self._make_room(step, patches)):
            return False
        whole = stop == depth
        step.encode(EncodeTask(span.view, key, pixels, done, None if whole else stop), (stop - done) / depth)
        if not whole:
            self._unfinished.advance(key, patches, stop)
        elif done:
            self._unfinished.finish(key)
        return whole

    def _affords(self, step: Step, patches: int, left: int, done: int, *, must: bool) -> int:
        """Layers of the `left` ones; up to where a captured stretch of layers ends, if it gets so far."""
        if step.target is None:
            return left
        depth, unit = self._limits.encode_layers, min(self._limits.encode_unit, left)
        until = step.target if step.views_until is None else step.views_until
        if must:
            until = max(until, step.milliseconds + self._limits.least_time * step.target)
        layers = step.cost.layers_within(until, step.work, patches, depth, left)
        if layers < left and layers > (behind := (done + layers) % self._limits.encode_unit):
            layers -= behind
        if must:
            return max(layers, 1)
        return layers if layers >= unit else 0

    def _make_room(self, step: Step, patches: int) -> bool:
        """For one more view, by giving up those not carried on for longest; never one of this step's."""
        views = self._unfinished
        for key in views.keys:
            if views.patches + patches <= views.capacity:
                break
            if key not in step.views:
                views.drop(key)
        return not len(views) or views.patches + patches <= views.capacity

    # Who wants what

    def sweep(self) -> None:
        """Give up what nobody has ahead of it any more."""
        for key in self._unfinished.keys:
            if not self._wanted(key):
                self._unfinished.drop(key)

    def failed(self, keys: Collection[bytes]) -> list[Group]:
        """A step with slices of these views could not be run: gives who waited for them."""
        self.give_up(keys)
        return [group for key in keys for group in self._viewers.get(key, ()) if _ahead(group, key)]

    def give_up(self, keys: Iterable[bytes]) -> None:
        """Nothing is left of these views: they begin anew."""
        for key in keys:
            self._unfinished.drop(key)

    def _wanted(self, key: bytes) -> bool:
        return any(_ahead(group, key) for group in self._viewers.get(key, ()))

    def check(self, launching: Iterable[bytes]) -> None:
        """Raise if a view is kept for nobody, or should have left; `launching` are the views of steps whose
        results are not known yet."""
        self._unfinished.check()
        shown = {(span.view.content, group) for group in self._views for span in group.layout.spans}
        if shown != {(content, group) for content, groups in self._showing.items() for group in groups}:
            raise RuntimeError("the pictures of requests, and the requests with pictures, differ")
        for key in self._unfinished.keys:
            if not self._wanted(key):
                raise RuntimeError(f"view {key.hex()[:12]} is kept half made, but nobody has it ahead")
            if self._unfinished.layers(key) >= self._limits.encode_layers:
                raise RuntimeError(f"view {key.hex()[:12]} is unfinished, though all its layers are planned")
        if left := set(self._unfinished.finishing) - set(launching):
            raise RuntimeError(f"{len(left)} views have had their last slice, but are still there half made")


def _ahead(group: Group, key: bytes) -> bool:
    """Whether a choice of the request has yet to compute tokens of the view."""
    stops = [span.stop for span in group.layout.spans if span.key == key]
    return any(choice.computed < stop for choice in group.choices for stop in stops)
