"""Collects what the scheduler decides for one step, within its budgets, and builds the `StepPlan`."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from saccade.request import TokenLogprobs
from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.policy import EarlyExit
from saccade.scheduler.sequence import RequestState, Sequence
from saccade.step_plan import BlockTableEntry, EncodeTask, ScheduledSequence, SlotInit, StepOutput, StepPlan

# A slice of a sequence; the epoch tells whether the sequence still has the same stay in its slot.
Planned = tuple[Sequence, int, ScheduledSequence]
Sampled = tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]


@dataclass
class StepBuilder:
    tokens_left: int
    patches_left: int
    cost: CostModel
    target: float | None = None  # ms the step may take while answers stream
    image_prefill_ms: float | None = None  # that image prefill may add while no answer streams
    protects_text: bool = False  # image prefill adds only its minimum to a step with text prefill
    encode_until: float | None = None  # ms up to which views are encoded; None: the target
    work: Work = field(default_factory=Work)
    new_slots: list[SlotInit] = field(default_factory=list)
    arriving: list[Sequence] = field(default_factory=list)  # sequences that get a slot in this step
    block_table_updates: list[BlockTableEntry] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    await_swaps: bool = False
    encodes: list[EncodeTask] = field(default_factory=list)
    views: set[bytes] = field(default_factory=set)  # keys of the encodes
    view_requests: dict[bytes, list[RequestState]] = field(default_factory=dict)  # that need a missing view
    singles: list[Planned] = field(default_factory=list)  # slices of one token: attended in one batch
    longer: list[Planned] = field(default_factory=list)
    num_sampling: int = 0  # slices that sample
    num_probing: int = 0  # slices that return relevance
    failed: bool = False  # in part: its time says nothing
    early_exit: bool = False
    deciding: set[int] = field(default_factory=set)  # ids of sequences that stop at a host decision
    resolved: bool = False  # host decisions were asked for with its relevance
    resolved_early: set[int] = field(default_factory=set)  # sequences whose decision was asked for

    @property
    def milliseconds(self) -> float:
        """Expected time so far."""
        return self.cost.predict(self.work)

    @property
    def planned(self) -> list[Planned]:
        return self.singles + self.longer

    def fit_tokens(self, start: int, tokens: int, until: float | None, least: int) -> int:
        """How many of a prompt's next `tokens` fit before the step takes `until` ms; at least `least`."""
        if until is None or tokens <= least:
            return tokens
        return max(self.cost.tokens_within(until, self.work, start, tokens), least)

    def encode(self, task: EncodeTask, share: float) -> None:
        """Encode a view, or a share of its layers."""
        self.encodes.append(task)
        self.views.add(task.key)
        self.patches_left -= task.patches
        self.work.add_view(task.patches, share)

    def start(self, sequence: Sequence) -> None:
        """The sequence has a slot from this step on."""
        self.new_slots.append(sequence.slot_init())
        self.arriving.append(sequence)
        sequence.arriving = True

    def schedule(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """Compute the slice, and send the device what it does not know: blocks, a changed prompt."""
        if sequence.prompt_changed:
            self.new_slots.append(sequence.slot_init())
            sequence.prompt_changed = False
        if sequence.dirty_blocks:
            self.block_table_updates += [
                (item.slot, index, sequence.blocks[index], 0) for index in sequence.dirty_blocks
            ]
            sequence.dirty_blocks = []
        (self.singles if item.num_tokens == 1 else self.longer).append((sequence, sequence.epoch, item))
        self.tokens_left -= item.num_tokens
        if item.sample:
            self.num_sampling += 1
        elif sequence.state.decision is not None and item.start + item.num_tokens == len(sequence.tokens):
            self.deciding.add(item.seq_id)
            self.num_probing += bool(item.relevance_targets)
        self.work.add_row(item.start, item.num_tokens)

    def build(self, number: int, early_exit: EarlyExit) -> StepPlan:
        for sequence in self.arriving:
            sequence.arriving = False
        self.early_exit = self.num_probing > 0 and self._only_probes(early_exit.max_tokens)
        return StepPlan(
            number=number,
            new_slots=tuple(self.new_slots),
            block_table_updates=tuple(self.block_table_updates),
            block_copies=tuple(self.block_copies),
            encodes=tuple(self.encodes),
            scheduled=tuple([item for _, _, item in self.planned]),
            swap_outs=self.swap_outs,
            swap_ins=tuple(self.swap_ins),
            await_swaps=self.await_swaps,
            expected_ms=self.milliseconds * (early_exit.time_share if self.early_exit else 1.0),
            early_exit=self.early_exit,
        )

    def _only_probes(self, most: int) -> bool:
        """Whether it only reads the relevance of views that are computed, with at most `most` tokens."""
        items = [item for _, _, item in self.planned]
        probes = all(item.relevance_targets and not item.spans for item in items)
        return probes and not self.encodes and sum(item.num_tokens for item in items) <= most

    def remove_failed_views(self, plan: StepPlan, failed: Container[bytes]) -> StepPlan:
        """What is left when these views could not be encoded and the requests that need them have ended.
        Slots may still be set up and blocks copied: there may be no sequence left."""
        self.singles = [one for one in self.singles if not one[0].finished]
        self.longer = [one for one in self.longer if not one[0].finished]
        self.arriving = [one for one in self.arriving if not one.finished]
        self.encodes = [task for task in self.encodes if task.key not in failed]
        self.views = {task.key for task in self.encodes}
        items = tuple(item for _, _, item in self.planned)
        self.num_sampling = sum(item.sample for item in items)
        self.num_probing = sum(bool(item.relevance_targets) for item in items)
        self.failed = True
        return replace(plan, encodes=tuple(self.encodes), scheduled=items)

    # The output

    def samples(self, output: StepOutput) -> Iterator[Sampled]:
        """Tokens and logprobs of every slice that samples, in order. Raises if they are not the plan's."""
        counts = output.num_tokens or (1,) * len(output.tokens)
        complete = self.num_sampling == len(counts) and sum(counts) == len(output.tokens)
        empty = 0 in counts and not any(item.num_draft_tokens for _, _, item in self.planned)
        if not complete or empty or len(output.logprobs) != len(output.tokens):
            raise RuntimeError(
                f"step {output.number} samples {self.num_sampling} sequences, but {len(output.tokens)} "
                f"tokens of {len(counts)} came back"
            )
        if self.num_probing != len(output.relevance):
            raise RuntimeError(
                f"step {output.number} probes {self.num_probing} sequences, but the relevance of "
                f"{len(output.relevance)} came back"
            )
        if not output.num_tokens:
            return zip(zip(output.tokens, strict=True), zip(output.logprobs, strict=True), strict=True)
        return _split(output, counts)

    def nonfinite_requests(self, output: StepOutput) -> list[str]:
        """Requests whose logits were not finite."""
        sampled = [sequence for sequence, _, item in self.planned if item.sample]
        return list(dict.fromkeys(sampled[index].state.request.id for index in output.nonfinite))


def _split(output: StepOutput, counts: tuple[int, ...]) -> Iterator[Sampled]:
    start = 0
    for count in counts:
        yield output.tokens[start : start + count], output.logprobs[start : start + count]
        start += count


def find_pending_faults(sequences: Iterable[Sequence], in_flight: Iterable[StepBuilder]) -> list[str]:
    """Unfinished sequences that wait for an output no step in flight will give."""
    sampled: Counter[int] = Counter()
    awaited = set()
    for step in in_flight:
        for sequence, _, item in step.planned:
            sampled[sequence.seq_id] += item.sample + item.num_draft_tokens
            if step.early_exit or item.num_draft_tokens:
                awaited.add(sequence.seq_id)
    faults = []
    for sequence in sequences:
        if sequence.finished or sequence.pending != sampled[sequence.seq_id]:
            faults.append(f"sequence {sequence.seq_id} waits for a token that no step samples")
        if sequence.awaits_output and (sequence.slot is None or sequence.seq_id not in awaited):
            faults.append(f"sequence {sequence.seq_id} waits for an output that no step gives")
    return faults
