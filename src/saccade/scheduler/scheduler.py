"""The scheduler: which sequences the next step computes, and what its output means for the requests.

A sequence takes the blocks of all its known tokens when it starts, so only growing output can find the pool
empty, by one block at a time; then others are preempted. The scheduler never touches the device or waits; its
only clock is the one it is given.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial
from itertools import count

from saccade.errors import ContextTooLong, EncodingFailed, InvalidValue, Overloaded
from saccade.lod.types import RelevanceMaps
from saccade.metrics import EngineStats
from saccade.request import Delta, FinishReason, Request
from saccade.scheduler.cost_model import Coefficients, CostModel
from saccade.scheduler.encoder_scheduler import IMAGE_EVICTED, IMAGE_NOT_FOUND
from saccade.scheduler.host_decision import HostDecisions
from saccade.scheduler.kv_manager import Caches, KVManager
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.queues import Queues
from saccade.scheduler.sequence import RequestState, Sequence, make_delta, new_sequences
from saccade.scheduler.stats import SchedulerStats
from saccade.scheduler.step_builder import Sampled, StepBuilder, find_pending_faults
from saccade.scheduler.step_planner import Drafter, StepPlanner
from saccade.step_plan import PromptLayout, ScheduledSequence, StepOutput, StepPlan

NONFINITE = "the model computed values that are not numbers; try another dtype or a shorter input"
MAX_IN_FLIGHT = 2  # steps; with more, a sequence would need a token two steps ahead of the host

NOTHING: Sampled = ((), ())


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        caches: Caches,
        cost: CostModel,
        clock: Callable[[], float] = time.monotonic,
        host_decisions: HostDecisions | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._config = config
        self._cost = cost
        self._kv = KVManager(config, caches, self._cost)
        self._clock = clock
        self._host_decisions = host_decisions
        self._requests: dict[str, RequestState] = {}
        self._pixel_bytes = 0  # of all requests
        self._unresolved: dict[str, tuple[RelevanceMaps, ...]] = {}  # decisions the host was not ready for
        self._queues = Queues(config.max_num_seqs)
        self._in_flight: dict[int, StepBuilder] = {}  # by plan number, oldest first
        self._seq_ids = count()
        self._stats = SchedulerStats(cost=self._cost)
        self._planner = StepPlanner(config, self._queues, self._kv, self._stats, clock, drafter)
        self.delete_image = self._kv.delete_image
        self.discard_untimed = self._stats.discard_untimed
        self.update_cost_model = self._stats.update_cost_model

    # Requests

    def add(self, request: Request, layout: PromptLayout) -> None:
        """Queue a request; raises a RequestError if it can never be answered, or not now."""
        if request.id in self._requests:
            raise InvalidValue(f"a request with the id {request.id!r} is being answered already", param="id")
        state = RequestState(request, layout, self._clock())
        if state.names_images:
            state.pixel_bytes += self._kv.encoder.named.feature_bytes(state)
        decisions = self._host_decisions
        if decisions is not None and getattr(request, decisions.request_field) is not None:
            state.decision = decisions.attach(request)
        num_waiting = len(self._requests) - self._queues.running_requests
        check_fits(state, self._config, self._kv, num_waiting, self._pixel_bytes)
        state.sequences = new_sequences(state, self._config, self._kv.prefix, self._seq_ids)
        if state.names_images:
            self._kv.encoder.named.admit(state, self._kv.uncached_views(state.sequences[0]))
        if layout.spans:
            self._kv.encoder.add(state)
        self._requests[request.id] = state
        self._pixel_bytes += state.pixel_bytes
        for sequence in state.sequences:
            self._planner.enqueue(sequence)
        if not state.sequences[0].encoding:
            self._planner.arrivals.add(state.arrival_time)

    def cancel(self, request_id: str) -> list[Delta]:
        """End a request now and free all it holds; no delta if it has ended already."""
        return self._end_request(request_id, "cancelled")

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step could not be run, or its output is lost: its requests end with an error, and those that
        wait for its views."""
        self._stats.discard_untimed()
        step = self._in_flight.pop(plan.number)
        sequences = [*step.arriving, *(sequence for sequence, _, _ in step.planned)]
        states = [sequence.state for sequence in sequences if not sequence.finished]
        states += self._kv.encoder.fail_step(step.views)
        self._kv.swap.space.fail(step.swap_outs)
        return self._fail_requests({state.request.id: message for state in states})

    def fail_views(self, plan: StepPlan, failed: Mapping[bytes, str]) -> tuple[StepPlan, list[Delta]]:
        """Views of the last planned step could not be encoded (by key: why): requests that need one end with
        an error. Gives what is left of the step, to be run instead."""
        step = self._in_flight[plan.number]
        deltas = self._fail_requests(self._kv.encoder.fail_views(step, failed), EncodingFailed.code)
        self._stats.count_failed_views(step, failed)
        return step.remove_failed_views(plan, failed), deltas

    def poll(self) -> list[Delta]:
        """Before each step: end requests whose named image is gone, ask again for pending host decisions."""
        deltas: list[Delta] = []
        if self._kv.encoder.named.lost:
            lost, self._kv.encoder.named.lost = self._kv.encoder.named.lost, {}
            deltas += self._fail_requests(dict.fromkeys(lost, IMAGE_EVICTED), IMAGE_NOT_FOUND)
        for request_id, relevance in list(self._unresolved.items()):
            deltas += self._resolve(self._requests[request_id], relevance)
        return deltas

    # Planning a step

    def plan(self) -> StepPlan | None:
        """The next step, or None while there is nothing to compute. May be called with one step in flight:
        the tokens that step samples count as known, though only the device knows them."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(
                f"{len(self._in_flight)} steps are in flight; apply one before planning another"
            )
        if self._kv.encoder.cache.needs_poll:
            self._kv.poll()
        step = StepBuilder(self._config.max_step_tokens, self._config.max_encode_patches, self._cost)
        self._planner.fill(step, self._stats.steps)
        planned = step.planned
        if not planned:
            return None
        if self._kv.swap.space.in_use:
            self._kv.swap.finish_plan(step)
        plan = step.build(self._stats.steps, self._config.early_exit)
        for source, _ in step.block_copies:
            self._kv.pool.release(source)
        for sequence, _, item in planned:
            if plan.early_exit:
                sequence.awaits_output = True
                continue
            sequence.num_computed_tokens += item.num_tokens
            if item.sample:
                sequence.pending += 1 + item.num_draft_tokens
                sequence.awaits_output = item.num_draft_tokens > 0
        if self._kv.encoder.partial.views:
            self._kv.encoder.drop_unneeded()
        self._in_flight[plan.number] = step
        self._stats.count_step(plan)
        return plan

    def wait_for_fetches(self) -> None:
        """For the engine loop when nothing could be planned: a sequence may wait for features on disk."""
        self._kv.encoder.cache.wait()

    # The output of a step

    def apply(self, plan: StepPlan, output: StepOutput, seconds: float | None = None) -> list[Delta]:
        """Take over a step's output; outputs come in the order of the plans. `seconds` is how long the step
        took; None if unknown: then it is part of the next step's."""
        oldest = next(iter(self._in_flight), None)
        if not oldest == plan.number == output.number:
            raise RuntimeError(f"step {oldest} is next to be applied, not {plan.number} with {output.number}")
        step = self._in_flight.pop(plan.number)
        self._stats.record_time(step, seconds)
        samples = step.samples(output)
        ended = self._resolve_step(step, output.relevance) if step.deciding and not step.resolved else []
        if output.nonfinite:  # the tokens of these mean nothing
            ended += self._fail_requests(dict.fromkeys(step.nonfinite_requests(output), NONFINITE))
        relevance = iter(output.relevance)
        special = step.early_exit or bool(step.deciding) or bool(output.num_tokens)
        block_size, generated = self._config.block_size, 0
        deltas = []
        for sequence, epoch, item in step.planned:
            tokens, logprobs = next(samples) if item.sample else NOTHING
            maps = next(relevance) if item.relevance_targets else ()
            if sequence.finished:
                continue  # stopped or cancelled meanwhile
            accepted, finish = 0, None
            if item.sample:  # a sequence preempted meanwhile gets its tokens too, and resumes after them
                sequence.pending -= 1 + item.num_draft_tokens
                accepted, finish = sequence.append(tokens)
            if sequence.epoch == epoch:
                computed = item.start + item.num_tokens
                if special:
                    computed = self._roll_back(sequence, step, item, accepted)
                if sequence.pins or computed // block_size > sequence.num_cached_blocks:
                    self._kv.cache_blocks(sequence, computed)
            if accepted:
                if accepted < len(tokens):
                    tokens, logprobs = tokens[:accepted], logprobs[:accepted]
                first = sequence.state.first_token_at is None and sequence.state.layout.spans
                kept = self._kv.encoder.named.kept(sequence.state) if first else ()
                deltas.append(make_delta(sequence, tokens, logprobs, finish, kept, self._clock))
                generated += accepted
                if finish:
                    self._end(sequence)
            elif item.seq_id in step.deciding and item.seq_id not in step.resolved_early:
                ended += self._resolve(sequence.state, maps)
        self._stats.generated_tokens += generated
        return deltas + ended

    def _roll_back(
        self, sequence: Sequence, step: StepBuilder, item: ScheduledSequence, accepted: int
    ) -> int:
        """Take back positions that must be computed again; gives how many are computed for good."""
        if step.early_exit:
            sequence.awaits_output = False
            return item.start
        if item.num_draft_tokens:  # rejected drafts are overwritten
            sequence.awaits_output = False
            sequence.num_computed_tokens = item.start + accepted
            self._kv.trim(sequence)
            return item.start + accepted
        # At a host decision the last position may be computed again, to sample.
        return item.start + item.num_tokens - (item.seq_id in step.deciding)

    # Host decisions

    def apply_relevance(self, plan: StepPlan, relevance: Ordered[tuple[RelevanceMaps, ...]]) -> list[Delta]:
        """Make host decisions with the relevance of a step in flight, before the rest of its output is known,
        so that the next step can go on from there. At most once per step; otherwise `apply` does it."""
        return self._resolve_step(self._in_flight[plan.number], relevance)

    def _resolve_step(self, step: StepBuilder, relevance: Ordered[tuple[RelevanceMaps, ...]]) -> list[Delta]:
        if step.resolved or len(relevance) != step.num_probing:
            raise RuntimeError(
                f"the relevance of {len(relevance)} sequences came, of {step.num_probing} once"
            )
        step.resolved = True
        deltas: list[Delta] = []
        maps = iter(relevance)
        for sequence, epoch, item in step.planned:
            found = next(maps) if item.relevance_targets else ()
            decision = sequence.state.decision
            if item.seq_id not in step.deciding or sequence.finished:
                continue
            if decision is not None and decision.finishes_request:
                continue  # with the output
            step.resolved_early.add(item.seq_id)
            if sequence.epoch == epoch:
                sequence.awaits_output = False
            deltas += self._resolve(sequence.state, found)
        return deltas

    def _resolve(self, state: RequestState, relevance: tuple[RelevanceMaps, ...]) -> list[Delta]:
        """Once per request: it may have been probed before a preemption already."""
        request_id = state.request.id
        if state.decision is None:
            return []
        try:
            resolution = state.decision.resolve(state.request, state.layout, relevance)
        except ValueError as error:
            return self._end_request(request_id, "error", f"the image could not be looked at: {error}")
        if resolution is None:
            self._unresolved[request_id] = relevance
            return []
        self._unresolved.pop(request_id, None)
        self._kv.replace_prompt(state, resolution.request, resolution.layout)
        if resolution.zoomed is not None:
            state.zoomed = resolution.zoomed
            state.look_seconds = max(self._clock() - state.started_at - state.encode_seconds, 0.0)
            self._stats.count_zoom(resolution.zoomed)
        return self._end_request(request_id, resolution.finish) if resolution.finish else []

    # Ending

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        self._planner.release(sequence)
        if sequence.swapped:
            self._kv.swap.space.drop(sequence.seq_id)
        state = sequence.state
        state.sequences.remove(sequence)
        if not state.sequences:
            del self._requests[state.request.id]
            self._unresolved.pop(state.request.id, None)
            self._pixel_bytes -= state.pixel_bytes
            if state.layout.spans:
                self._kv.encoder.remove(state)
            if state.names_images:
                self._kv.encoder.named.release(state)
        if self._kv.encoder.partial.views:
            self._kv.encoder.drop_unneeded()

    def _fail_requests(self, messages: Mapping[str, str], code: str | None = None) -> list[Delta]:
        """End requests with an error; message by request id."""
        return [one for name, why in messages.items() for one in self._end_request(name, "error", why, code)]

    def _end_request(
        self, request_id: str, finish: FinishReason, error: str | None = None, code: str | None = None
    ) -> list[Delta]:
        state = self._requests.get(request_id)
        if state is None:
            return []
        ending = list(state.sequences)
        for sequence in ending:
            self._end(sequence)
        final = partial(
            Delta, request_id=request_id, finish=finish, error=error, code=code, zoomed=state.zoomed
        )
        return [final(index=sequence.index) for sequence in ending]

    # Stats and checks

    @property
    def idle(self) -> bool:
        """No request is waiting or running, and no step in flight."""
        return not self._requests and not self._in_flight

    @property
    def bottleneck(self) -> str | None:
        return self._queues.bottleneck

    @property
    def costs(self) -> Coefficients:
        return self._cost.coefficients

    def stats(self) -> EngineStats:
        oldest = next((state for state in self._requests.values() if not state.started), None)
        return EngineStats(
            waiting=len(self._requests) - self._queues.running_requests,
            oldest_wait=self._clock() - oldest.arrival_time if oldest else 0.0,
            features=self._kv.encoder.cache.stats,
            step_error=self._cost.error,
            waiting_encode=len(self._queues.waiting[True]),
            waiting_other=len(self._queues.waiting[False]),
            running=self._queues.running_requests,
            **self._kv.stats(),
            **self._stats.values(),
        )

    def check(self) -> None:
        """Raise if any bookkeeping contradicts another; for tests and idle moments."""
        self._kv.check(self._queues.running, self._requests.values())
        self._kv.encoder.check(key for step in self._in_flight.values() for key in step.views)
        sequences = {sequence for state in self._requests.values() for sequence in state.sequences}
        faults = self._queues.find_faults(sequences)
        faults += find_pending_faults(sequences, self._in_flight.values())
        if faults:
            raise RuntimeError("scheduler: " + "; ".join(faults))


def check_fits(
    state: RequestState, config: SchedulerConfig, kv: KVManager, num_waiting: int, pixel_bytes: int
) -> None:
    """Raise for a request that is invalid, can never fit, or finds the queue full. `pixel_bytes`: of the
    requests present."""
    sampling, prompt = state.request.sampling, state.request.max_length
    if prompt < 1:
        raise InvalidValue("the prompt is empty; it needs at least one token", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidValue(f"max_tokens is {sampling.max_tokens}; ask for at least 1", param="max_tokens")
    if sampling.n < 1:
        raise InvalidValue(f"n is {sampling.n}; ask for at least 1", param="n")
    if prompt >= config.max_model_len:
        visual = sum(span.view.tokens for span in state.layout.spans)
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, of which images take {visual}; the context holds "
            f"{config.max_model_len}, output included; shorten the prompt or use smaller images",
            param="prompt",
        )
    blocks = config.blocks_for(config.max_tokens_of(state.request) - 1)  # the last token is never computed
    if blocks > kv.pool.count:
        raise ContextTooLong(
            f"{prompt} prompt tokens and up to {sampling.max_tokens} output tokens need {blocks} KV blocks "
            f"of {config.block_size} tokens; the cache has {kv.pool.count}; shorten the prompt or lower "
            "max_tokens",
            param="max_tokens",
        )
    if kv.pool.has_vision_pool:
        vision = kv.vision_blocks(state).among(0, blocks)
        for name, needed, is_vision in (("text", blocks - vision, False), ("images", vision, True)):
            if needed > kv.pool.size(vision=is_vision):
                raise ContextTooLong(
                    f"the request needs {needed} KV blocks of {config.block_size} tokens for {name}; their "
                    f"pool has {kv.pool.size(vision=is_vision)}; shorten the prompt, lower max_tokens or use "
                    "smaller images",
                    param="prompt",
                )
    if num_waiting >= config.max_queue:
        raise Overloaded(
            f"{num_waiting} requests are waiting and the queue holds {config.max_queue}; try again later"
        )
    if pixel_bytes and pixel_bytes + state.pixel_bytes > config.max_queue_bytes:
        raise Overloaded(
            f"images of {pixel_bytes} bytes are waiting or being answered, and {config.max_queue_bytes} may "
            "be at a time; try again later"
        )
