"""A step plan in the making: collects what the scheduler decides, within the step's budgets.

takes   rows, block copies and encodes, one decision at a time
gives   the StepPlan
never   decides
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from saccade.scheduler.cost_model import CostModel, Work
from saccade.scheduler.policy import Brief
from saccade.scheduler.sequence import Group, Sequence
from saccade.step_plan import BlockTableEntry, EncodeTask, ScheduledSequence, SlotInit, StepOutput, StepPlan

# A row and whose it is; the epoch tells whether the sequence is still in the same stay on that row.
Planned = tuple[Sequence, int, ScheduledSequence]


@dataclass
class Step:
    tokens_left: int
    patches_left: int
    cost: CostModel
    target: float | None = None  # ms it may take, where streams are waiting for it
    quiet: float | None = None  # ms that prompts with views to encode may add to it, where none are
    spares: bool = False  # those add no more than they must to prompts of others
    views_until: float | None = None  # ms it may have grown to for views to be carried on; None: its target
    work: Work = field(default_factory=Work)
    enter: list[SlotInit] = field(default_factory=list)
    arriving: list[Sequence] = field(default_factory=list)  # whose rows those are
    table: list[BlockTableEntry] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target)
    swap_outs: tuple[tuple[int, int], ...] = ()  # (block, slot)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (slot, block)
    await_swaps: bool = False  # this step reads some of them
    encodes: list[EncodeTask] = field(default_factory=list)
    views: set[bytes] = field(default_factory=set)  # keys of those
    asked: dict[bytes, list[Group]] = field(default_factory=dict)  # who came to a view that is not there yet
    singles: list[Planned] = field(default_factory=list)  # rows of one token: attended in one batch
    longer: list[Planned] = field(default_factory=list)
    sampling: int = 0  # rows that yield a token
    looking: int = 0  # rows that yield looks
    spoiled: bool = False  # parts of it failed: how long it takes says nothing
    brief: bool = False  # as StepPlan.brief; known when the plan is made
    heard: bool = False  # what its looks lead to is decided, though its result may still be on its way

    @property
    def milliseconds(self) -> float:
        """What it is expected to take as it stands."""
        return self.cost.predict(self.work)

    def affords(self, start: int, tokens: int, until: float | None, least: int) -> int:
        """How many of a prompt's next `tokens` fit before the step takes `until` ms; `least` in any case."""
        if until is None or tokens <= least:
            return tokens
        return max(self.cost.tokens_within(until, self.work, start, tokens), least)

    def encode(self, encode: EncodeTask, share: float) -> None:
        """Carry a view through a share of the vision tower."""
        self.encodes.append(encode)
        self.views.add(encode.key)
        self.patches_left -= encode.patches
        self.work.add_view(encode.patches, share)

    def let_in(self, sequence: Sequence) -> None:
        """It has a row from this step on."""
        self.enter.append(sequence.enter())
        self.arriving.append(sequence)
        sequence.arriving = True

    def run(self, sequence: Sequence, row: ScheduledSequence) -> None:
        """Compute the row, and tell the device what it does not know of the sequence: blocks, the prompt."""
        if sequence.renewed:
            self.enter.append(sequence.enter())
            sequence.renewed = False
        if sequence.stale:
            self.table += [(row.slot, index, sequence.blocks[index], 0) for index in sequence.stale]
            sequence.stale = []
        (self.singles if row.num_tokens == 1 else self.longer).append((sequence, sequence.epoch, row))
        self.tokens_left -= row.num_tokens
        self.sampling += row.sample
        self.looking += bool(row.relevance_targets)
        self.work.add_row(row.start, row.num_tokens)

    def check(self, result: StepOutput) -> None:
        """Raise unless the result has what the step yields."""
        sampled = self.sampling == len(result.tokens) == len(result.logprobs)
        if not sampled or self.looking != len(result.relevance):
            raise RuntimeError(
                f"step {result.number} samples {self.sampling} tokens and looks {self.looking} times, but "
                f"{len(result.tokens)} and {len(result.relevance)} came back"
            )

    def unsound(self, result: StepOutput) -> list[str]:
        """Requests whose logits were no numbers: any token of theirs would be made up."""
        if not result.nonfinite:
            return []
        sampled = [sequence for sequence, _, row in self.planned if row.sample]
        return list(dict.fromkeys(sampled[place].group.request.id for place in result.nonfinite))

    def only_looks(self, most: int) -> bool:
        """Whether all it does is to look at views that are computed, by at most so many tokens."""
        rows = [row for _, _, row in self.planned]
        looks = bool(rows) and all(row.relevance_targets and not row.spans for row in rows)
        return looks and not self.encodes and sum(row.num_tokens for row in rows) <= most

    def plan(self, number: int, brief: Brief) -> StepPlan:
        """Nothing may be added any more."""
        for sequence in self.arriving:
            sequence.arriving = False
        self.brief = self.only_looks(brief.tokens)
        return StepPlan(
            number=number,
            new_slots=tuple(self.enter),
            block_table_updates=tuple(self.table),
            block_copies=tuple(self.copies),
            encodes=tuple(self.encodes),
            scheduled=tuple([row for _, _, row in self.planned]),
            swap_outs=self.swap_outs,
            swap_ins=tuple(self.swap_ins),
            await_swaps=self.await_swaps,
            expected_ms=self.milliseconds * (brief.share if self.brief else 1.0),
            early_exit=self.brief,
        )

    def without(self, plan: StepPlan, failed: Container[bytes]) -> StepPlan:
        """What is left when these views could not be made, and who needed them has ended. Rows that have
        nothing to compute any more may still be told things, and blocks copied: there may be no row left."""
        self.singles = [one for one in self.singles if not one[0].ended]
        self.longer = [one for one in self.longer if not one[0].ended]
        self.arriving = [one for one in self.arriving if not one.ended]
        self.encodes = [encode for encode in self.encodes if encode.key not in failed]
        self.views = {encode.key for encode in self.encodes}
        rows = tuple(row for _, _, row in self.planned)
        self.sampling = sum(row.sample for row in rows)
        self.looking = sum(bool(row.relevance_targets) for row in rows)
        self.spoiled = True
        return replace(plan, encodes=tuple(self.encodes), scheduled=rows)

    @property
    def planned(self) -> list[Planned]:
        return self.singles + self.longer


def looking_faults(everyone: Iterable[Sequence], in_flight: Iterable[Step]) -> list[str]:
    """What contradicts what, of the sequences that have not ended and the steps whose results are to come."""
    coming = {id(one) for step in in_flight if step.brief for one, _, _ in step.planned}
    return [
        f"sequence {item.handle} waits for a look that is not on its way"
        for item in everyone
        if item.looking and (item.row is None or id(item) not in coming)
    ]
