"""What the scheduler counts: totals that only grow, and who has waited longest.

takes   word of every request and step as it comes, starts, ends
gives   the counters of EngineStats, by name
never   decides
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from saccade.request import ZoomResult
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.sequence import Group, Sequence
from saccade.scheduler.step_builder import Step
from saccade.step_plan import StepPlan


@dataclass
class Counters:
    """Names and meanings as in EngineStats."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_copied_tokens: int = 0
    prefix_queried_visual_tokens: int = 0
    prefix_hit_visual_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    visual_tokens: int = 0
    full_visual_tokens: int = 0
    looks: int = 0
    gated_looks: int = 0
    zooms: int = 0
    steps: int = 0
    encodes: int = 0
    encode_slices: int = 0
    encode_failures: int = 0
    started: int = 0
    wait_seconds: float = 0.0
    timed_steps: int = 0
    step_seconds: float = 0.0
    step_seconds_predicted: float = 0.0


@dataclass
class Totals(Counters):
    # By request id, longest waiting first.
    _unstarted: OrderedDict[str, Group] = field(default_factory=OrderedDict)
    _untimed: tuple[float, ...] | None = None  # quantities of steps whose time is part of the next one's
    _lesson: tuple[tuple[float, ...], float] | None = None  # quantities and ms, not learnt from yet

    def counted(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def oldest_wait(self, now: float) -> float:
        first = next(iter(self._unstarted.values()), None)
        return now - first.since if first else 0.0

    def came(self, group: Group) -> None:
        self._unstarted[group.request.id] = group

    def gone(self, group: Group) -> None:
        self._unstarted.pop(group.request.id, None)

    def start(self, sequence: Sequence, now: float, block_size: int) -> None:
        """A sequence has a row; its request counts when it is the first of it."""
        group = sequence.group
        if group.started:
            return
        group.started = True
        group.started_at = now
        group.cached = sequence.computed
        self.gone(group)
        self.started += 1
        self.wait_seconds += now - group.since
        request, layout = group.request, group.layout  # zoomed views count once they are chosen
        self.prompt_tokens += request.length
        self.visual_tokens += sum(span.view.tokens for span in layout.spans)
        self.full_visual_tokens += request.full_detail_tokens
        if sequence.chain is not None:  # there is a prefix cache
            self.prefix_queried_tokens += len(layout.tokens)
            self.prefix_hit_tokens += sequence.computed
            self.prefix_copied_tokens += sequence.computed % block_size
            for span in layout.spans:
                self.prefix_queried_visual_tokens += span.view.tokens
                self.prefix_hit_visual_tokens += max(min(span.stop, sequence.computed) - span.start, 0)

    def looked(self, zoomed: ZoomResult) -> None:
        self.prompt_tokens += zoomed.more_tokens
        self.visual_tokens += zoomed.visual_tokens
        self.looks += len(zoomed.regions)
        self.gated_looks += sum(why is not None for why in zoomed.gated)
        self.zooms += sum(map(len, zoomed.regions))

    def gave_way(self, sequence: Sequence) -> None:
        sequence.group.preempted += 1
        self.preemptions += 1

    def sent(self, plan: StepPlan) -> None:
        self.steps += 1
        finished = sum(encode.stop_layer is None for encode in plan.encodes)
        self.encodes += finished
        self.encode_slices += sum(
            encode.first_layer > 0 or encode.stop_layer is not None for encode in plan.encodes
        )

    def failed(self, step: Step, views: Collection[bytes]) -> None:
        """Of a step that was sent: these could not be made."""
        lost = [encode for encode in step.encodes if encode.key in views]
        self.encode_failures += len(lost)
        self.encodes -= sum(encode.stop_layer is None for encode in lost)
        self.encode_slices -= sum(encode.first_layer > 0 or encode.stop_layer is not None for encode in lost)

    def time(self, cost: CostModel, step: Step, seconds: float | None) -> None:
        """A step is over: compare, as soon as its time is known. The model learns when there is time."""
        if step.spoiled or step.brief:  # the model knows whole steps
            self.forget_untimed()
            return
        quantities = cost.quantities(step.work)
        if self._untimed is not None:
            quantities = tuple(map(sum, zip(self._untimed, quantities, strict=True)))
        self._untimed = quantities if seconds is None else None
        if seconds is not None:
            self.timed_steps += 1
            self.step_seconds += seconds
            self.step_seconds_predicted += cost.price(quantities) / 1e3
            self.study(cost)
            self._lesson = quantities, seconds * 1e3
        if step.encodes:
            expected = cost.price(quantities) / 1e3
            _charge(step, cost.encoding(step.work) / 1e3 * ((seconds or expected) / (expected or 1.0)))

    def study(self, cost: CostModel) -> None:
        """Let the model learn from the step timed last."""
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            cost.observe(*lesson)

    def forget_untimed(self) -> None:
        self._untimed = None


def _charge(step: Step, seconds: float) -> None:
    """What a step's views took, to each request that has waited for one of them."""
    views = {encode.key for encode in step.encodes}
    waited = [one for one in step.planned if any(span.key in views for span in one[0].pins.values())]
    for group in {id(one.group): one.group for one, _, _ in waited}.values():
        group.encode_seconds += seconds
    if step.heard:  # what it took to look was counted before it was known what of that was encoding
        for group in {id(one.group): one.group for one, _, row in waited if row.relevance_targets}.values():
            group.look_seconds = max(group.look_seconds - seconds, 0.0)
