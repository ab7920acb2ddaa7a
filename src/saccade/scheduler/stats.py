"""The scheduler's counters for EngineStats, and the times of steps and requests."""

from collections.abc import Collection, Iterable
from typing import Any

from saccade.metrics import SchedulerCounters
from saccade.request import ZoomResult
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.sequence import Sequence
from saccade.scheduler.step_builder import StepBuilder
from saccade.step_plan import EncodeTask, StepPlan


class SchedulerStats(SchedulerCounters, kw_only=True):
    cost: CostModel
    _untimed: tuple[float, ...] | None = None  # quantities of steps whose time is part of the next one's
    _observation: tuple[tuple[float, ...], float] | None = None  # quantities and ms, not learnt yet

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SchedulerCounters.__struct_fields__}

    def count_start(self, sequence: Sequence, now: float, block_size: int) -> None:
        """A sequence gets a slot; counts the first of a request."""
        state = sequence.state
        if state.started:
            return
        state.started = True
        state.started_at = now
        state.cached_tokens = sequence.num_computed_tokens
        self.started += 1
        self.wait_seconds += now - state.arrival_time
        request, layout = state.request, state.layout
        self.prompt_tokens += request.length
        self.visual_tokens += sum(span.view.tokens for span in layout.spans)
        self.full_visual_tokens += request.full_detail_tokens
        if sequence.chain is not None:
            self.prefix_queried_tokens += len(layout.tokens)
            self.prefix_hit_tokens += sequence.num_computed_tokens
            self.prefix_copied_tokens += sequence.num_computed_tokens % block_size
            for span in layout.spans:
                self.prefix_queried_visual_tokens += span.view.tokens
                self.prefix_hit_visual_tokens += max(
                    min(span.stop, sequence.num_computed_tokens) - span.start, 0
                )

    def count_zoom(self, zoomed: ZoomResult) -> None:
        self.prompt_tokens += zoomed.more_tokens
        self.visual_tokens += zoomed.visual_tokens
        self.looks += len(zoomed.regions)
        self.gated_looks += sum(why is not None for why in zoomed.gated)
        self.zooms += sum(map(len, zoomed.regions))

    def count_step(self, plan: StepPlan) -> None:
        self.steps += 1
        self._count_encodes(plan.encodes, 1)

    def _count_encodes(self, encodes: Iterable[EncodeTask], sign: int) -> None:
        for task in encodes:
            self.encodes += sign * (task.stop_layer is None)
            self.encode_slices += sign * (task.first_layer > 0 or task.stop_layer is not None)

    def count_failed_views(self, step: StepBuilder, views: Collection[bytes]) -> None:
        """These views of a planned step could not be encoded."""
        lost = [encode for encode in step.encodes if encode.key in views]
        self.encode_failures += len(lost)
        self._count_encodes(lost, -1)

    def record_time(self, step: StepBuilder, seconds: float | None) -> None:
        """Compare a step's time with its prediction. Time that is not known is part of the next step's."""
        cost = self.cost
        if step.failed or step.early_exit:  # the model knows complete steps only
            self.discard_untimed()
            return
        quantities = cost.quantities(step.work)
        if self._untimed is not None:
            quantities = tuple(map(sum, zip(self._untimed, quantities, strict=True)))
        self._untimed = quantities if seconds is None else None
        if seconds is not None:
            self.timed_steps += 1
            self.step_seconds += seconds
            self.step_seconds_predicted += cost.price(quantities) / 1e3
            self.update_cost_model()
            self._observation = quantities, seconds * 1e3
        if step.encodes:
            expected = cost.price(quantities) / 1e3
            _charge_encoding(
                step, cost.encoding(step.work) / 1e3 * ((seconds or expected) / (expected or 1.0))
            )

    def update_cost_model(self) -> None:
        """Let the model learn from the last timed step; called when there is time."""
        observation, self._observation = self._observation, None
        if observation is not None:
            self.cost.observe(*observation)

    def discard_untimed(self) -> None:
        self._untimed = None


def _charge_encoding(step: StepBuilder, seconds: float) -> None:
    """Charge the time of a step's views to each request that waited for one of them."""
    views = {encode.key for encode in step.encodes}
    waited = [one for one in step.planned if any(span.key in views for span in one[0].pins.values())]
    for state in {id(one.state): one.state for one, _, _ in waited}.values():
        state.encode_seconds += seconds
    if step.resolved:  # look_seconds was taken before it was known how much of it was encoding
        for state in {id(one.state): one.state for one, _, item in waited if item.relevance_targets}.values():
            state.look_seconds = max(state.look_seconds - seconds, 0.0)
