"""What the looks of a step lead to: views are chosen.

takes   a step, and what its rows with sights have seen
gives   news of requests that end by it
never   chooses itself; decides twice for a request

Looks are there before the rest of a step's result, so they may be heard first: then the next step goes on
from what they decide.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Protocol

from saccade.lod.types import RelevanceMaps
from saccade.request import Delta, FinishReason
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.lod_choice import Looking
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Group
from saccade.scheduler.stats import Totals
from saccade.scheduler.step_builder import Step


class End(Protocol):
    def __call__(self, name: str, finish: FinishReason, error: str | None = None, /) -> list[Delta]: ...


class Hearing:
    def __init__(
        self,
        limits: Limits,
        holdings: Holdings,
        totals: Totals,
        clock: Callable[[], float],
        looking: Callable[[], Looking],
        end: End,
    ) -> None:
        """`looking` gives who chooses; `end` ends a request."""
        self._limits = limits
        self._holdings = holdings
        self._totals = totals
        self._clock = clock
        self._looking = looking
        self._end = end

    def hear(self, step: Step, looks: Ordered[tuple[RelevanceMaps, ...]]) -> list[Delta]:
        """Decide for all rows that look, but for requests that end with a look: what they have computed is
        found by others only if they are still there when the step's result is."""
        if step.heard or len(looks) != step.looking:
            raise RuntimeError(f"{len(looks)} looks are heard; {step.looking} were to be, once")
        step.heard = True
        told = []
        asking = [(sequence, epoch) for sequence, epoch, row in step.planned if row.relevance_targets]
        for (sequence, epoch), seen in zip(asking, looks, strict=True):
            zooming = sequence.group.request.zooming
            if sequence.ended or (zooming is not None and zooming.preview_only):
                continue
            if sequence.epoch == epoch:
                sequence.looking = False
            told += self.decide(sequence.group, seen)
        return told

    def decide(self, group: Group, looks: tuple[RelevanceMaps, ...]) -> list[Delta]:
        """The views of a request are chosen, once: another stay of it may have looked before it gave way."""
        if not group.undecided:
            return []
        name = group.request.id
        try:
            zoomed = self._looking().decide(group, looks, self._limits, self._holdings)
        except ValueError as error:
            return self._end(name, "error", f"the picture could not be looked at: {error}")
        group.looked(self._clock())
        self._totals.looked(zoomed)
        return self._end(name, "stop") if zoomed.looks else []
