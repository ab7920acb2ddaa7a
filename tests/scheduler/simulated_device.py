"""A device without a model: pages of cells instead of KV, a hash instead of a forward pass.

Each cell is a hash of its input and of the cell before it, as KV is a function of everything before it. So a
cell that is stale, foreign or overwritten breaks the chain of whoever reads it, and the token sampled from
a wrong chain is a wrong token.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from saccade.encoder.cache.disk import DiskTier
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.partial_views import PartialViews
from saccade.encoder.prompt_layout import insert_zoomed_views, lay_out_prompt
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.pool_sizing import VISION_SCOPES
from saccade.kv_cache.prefix_cache import PinnedPrefixes, PrefixCache
from saccade.kv_cache.swap_space import SwapSpace
from saccade.lod.controller import Choose, LodController
from saccade.lod.types import (
    Grid,
    ImageMaps,
    LodParams,
    Region,
    RelevanceMaps,
    ScoredImage,
    ViewRule,
    ZoomChoice,
)
from saccade.request import Delta, Media, Request, Sampling, TokenLogprobs, View, ZoomRequest
from saccade.scheduler.cost_model import Coefficients, CostModel, Work
from saccade.scheduler.host_decision import HostDecisions
from saccade.scheduler.kv_manager import Caches
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.scheduler.sequence import derive_seed
from saccade.scheduler.step_planner import Drafter
from saccade.step_plan import (
    EncodeTask,
    PromptLayout,
    Role,
    ScheduledSequence,
    SlotInit,
    StepOutput,
    StepPlan,
)

IMAGE_ID = 0  # the placeholder; text uses 1 and above
MARK_ID = 3  # before a zoomed view
STOP_ID = 1
VOCABULARY = 9
ROOT = 0  # what stands before the first cell
HALF = 1  # a cell that has not passed all layers
FEATURE_BYTES = 10  # per token of a view
STEP_SECONDS = 0.05  # on the engine's clock, where no costs are given

# Milliseconds that make every part of a small step matter.
COSTS = Coefficients(
    fixed=1.0,
    mixed=0.5,
    row=0.1,
    context=0.01,
    token=0.2,
    crowded=0.1,
    pair=0.001,
    encoding=0.5,
    patch=0.1,
    patch_pair=0.0005,
    ridge=4.0,
)


class Cell(NamedTuple):
    before: int
    value: int


def image(name: int, slot: int, rows: int = 2, columns: int = 2, frame: Grid | None = None) -> Media:
    """An image of rows x columns tokens; all its pixels are its name. With a frame: a global view."""
    content = name.to_bytes(16, "little")
    view = View(content, (0, 0, columns, rows), (2 * rows, 2 * columns), 2, b"test")
    return Media(slot, view, np.full((1, rows, columns, 3), name, dtype=np.uint8), frame)


def question(
    name: str,
    prompt: list[int],
    images: tuple[Media, ...] = (),
    *,
    salt: bytes = b"",
    priority: int = 0,
    zooming: ZoomRequest | None = None,
    registered: bool = False,
    **sampling: Any,
) -> Request:
    """Greedy or not makes no difference here: the device mixes in the seed."""
    options: dict[str, Any] = {"stop_token_ids": (STOP_ID,), "seed": None, "max_tokens": 4, **sampling}
    return Request(
        id=name,
        prompt=tuple(prompt),
        media=images,
        sampling=Sampling(**options),
        salt=salt,
        priority=priority,
        zooming=zooming,
        registered=registered,
    )


def zooming(
    at: int, slots: tuple[int, ...], tokens: int, images: tuple[Media, ...], *, preview_only: bool = False
) -> ZoomRequest:
    """Views of `tokens` together may be chosen at index `at` of the prompt."""
    probed = sum(one.view.tokens for one in images if one.placeholder in slots)
    return ZoomRequest(
        params=LodParams(),
        placeholders=slots,
        budget=probed + tokens,
        most_views=2 * len(slots),
        at=at,
        before=(MARK_ID,),
        after=(),
        preview_only=preview_only,
    )


def look_of(cells: list[int]) -> RelevanceMaps:
    """A look at the cells of a view and the question's last: any change of any of them shows."""
    seen = np.full((1, 1), abs(hash(tuple(cells))) % 1009, dtype=np.float32)
    return RelevanceMaps(
        image_maps=ImageMaps(propositional=seen, perspectival=seen, lost=seen), participatory=seen
    )


def choose_by_hash(images: Any, budget: int, params: LodParams, rule: ViewRule) -> tuple[ZoomChoice, ...]:
    """Up to two views of one or two tokens of each image, as the looks have it, within the budget."""
    return choose_among(1009)(images, budget, params, rule)


def choose_among(outcomes: int) -> Choose:
    """The same with few outcomes: questions about one image often lead to the same views."""
    return partial(_choose, outcomes)


def _choose(
    outcomes: int, images: Any, budget: int, params: LodParams, rule: ViewRule
) -> tuple[ZoomChoice, ...]:
    left = budget - sum(one.grid[0] * one.grid[1] for one in images)
    choices = []
    for one in images:
        number = int(one.look.participatory[0, 0]) % outcomes
        regions: list[Region] = []
        for part in range(number % 3):
            columns = 1 + number // 3 % 2
            if columns <= left:
                left -= columns
                regions.append(Region((part, 0, part + 1, 1 + number // 6 % 2), (1, columns), 1.0))
        choices.append(ZoomChoice(regions=tuple(regions), relevance=one.look.lost))
    return tuple(choices)


def decided_alone(request: Request, limits: SchedulerConfig, roles: Set[Role], chooser: Choose) -> Request:
    """The request with its views chosen, as it would be alone."""
    if request.zooming is None:
        return request
    cells = all_cells(request, limits, roles)
    media = {item.placeholder: item for item in request.media}
    order = sorted(media)
    spans = dict(zip(order, lay_out_prompt(request).spans, strict=True))
    slots = request.zooming.placeholders
    images = [
        ScoredImage(
            look=look_of([cell.value for cell in (*cells[spans[slot].start : spans[slot].stop], cells[-1])]),
            size=media[slot].view.box[2:],
            frame=media[slot].full,
            grid=media[slot].view.token_grid,
        )
        for slot in slots
    ]
    choices = chooser(images, request.zooming.budget, request.zooming.params, ViewRule())
    return insert_zoomed_views(
        request, {slot: choice.regions for slot, choice in zip(slots, choices, strict=True)}
    )


def all_cells(request: Request, limits: SchedulerConfig, roles: Set[Role]) -> list[Cell]:
    """Of the prompt as it is laid out, one after the other."""
    layout = lay_out_prompt(request)
    names = {item.placeholder: int(item.pixels.flat[0]) for item in request.media if item.pixels.size}
    shown = [item.placeholder if item.origin is None else item.origin for item in in_order(request)]
    inputs: list[int] = list(layout.tokens)
    for span, slot in zip(layout.spans, shown, strict=True):
        for offset in range(span.view.tokens):
            inputs[span.start + offset] = visual_input(names[slot], span.view, offset)
    views = {token for span in layout.spans if span.role in roles for token in range(span.start, span.stop)}
    cells: list[Cell] = []
    for index, content in enumerate(inputs):
        first = index // limits.block_size * limits.block_size
        apart = views.issuperset(range(first, first + limits.block_size))
        before = cells[-1].value if cells else ROOT
        cells.append(next_cell(before, content, true_positions(layout, index), apart))
    return cells


def in_order(request: Request) -> list[Media]:
    return sorted(request.media, key=lambda item: item.placeholder)


def next_cell(before: int, content: int, positions: tuple[float, ...], apart: bool) -> Cell:
    """A block in the vision pool may be of another precision: what is computed of it differs."""
    return Cell(before, hash((before, content, *positions, *[apart] * apart)))


def sample(last: Cell, seed: int, output_position: int) -> int:
    return 1 + hash((last.value, seed, output_position)) % (VOCABULARY - 1)


def visual_input(name: int, view: View, offset: int) -> int:
    return -2 - abs(hash((name, view.box, view.grid, offset)))  # apart from every token id


def answer_alone(
    request: Request,
    index: int,
    limits: SchedulerConfig,
    roles: Set[Role] = frozenset(),
    chooser: Choose = choose_by_hash,
) -> list[int]:
    """What the request's choice gets with the engine to itself: the whole truth, without blocks or steps."""
    request = decided_alone(request, limits, roles, chooser)
    layout = lay_out_prompt(request)
    sampling = request.sampling
    seed = derive_seed(sampling, limits.seed, request.id, index)
    cells = all_cells(request, limits, roles)
    output: list[int] = []
    for index in range(len(cells), min(len(cells) + sampling.max_tokens, limits.max_model_len)):
        output.append(sample(cells[-1], seed, len(output)))
        if len(output) >= sampling.min_tokens and output[-1] in sampling.stop_token_ids:
            break
        cells.append(next_cell(cells[-1].value, output[-1], true_positions(layout, index), False))
    return output


def true_positions(layout: PromptLayout, index: int) -> tuple[float, ...]:
    if index < len(layout.tokens):
        return tuple(float(axis[index]) for axis in layout.positions)
    return (float(index + layout.delta),) * 3


@dataclass
class Device:
    limits: SchedulerConfig
    pool: BlockPool
    store: EncoderCache[int]
    unfinished: PartialViews[tuple[int, ...]]
    tables: dict[tuple[int, int], int] = field(default_factory=dict)
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)  # (block, offset)
    entered: dict[int, SlotInit] = field(default_factory=dict)
    last_tokens: dict[int, int] = field(default_factory=dict)
    encoded: list[bytes] = field(default_factory=list)
    host: dict[int, dict[int, Cell]] = field(default_factory=dict)  # slot -> cells by offset
    coming: list[tuple[int, dict[int, Cell]]] = field(default_factory=list)  # (block, cells), still under way
    swapped: int = 0  # blocks that came back
    slices: int = 0  # that did not complete their view
    probed: int = 0  # rows that looked
    early_exits: int = 0  # steps that ended before the last layers
    accepted: int = 0  # drafts
    fails: Callable[[EncodeTask], bool] = lambda encode: False
    declines: Callable[[], bool] = lambda: False  # a slice with drafts gives no token at all

    def place(self, row: int, index: int) -> tuple[int, int]:
        return self.tables[row, index // self.limits.block_size], index % self.limits.block_size

    def begin(self, plan: StepPlan) -> dict[bytes, str]:
        """Swaps and views; gives those that fail, of which nothing is done."""
        self.check_budgets(plan)
        self.swap(plan)
        failed = {encode.key: "bad luck" for encode in plan.encodes if self.fails(encode)}
        for encode in plan.encodes:
            if encode.key not in failed:
                self.encode(encode)
        return failed

    def run(self, plan: StepPlan) -> StepOutput:
        """The rest, in the plan's order. The scheduler has not been called since it made the plan, but to
        take out what needs a view that failed."""
        for enter in plan.new_slots:
            self.entered[enter.slot] = enter
        for row_number, index, block, _ in plan.block_table_updates:
            self.tables[row_number, index] = block
        self.copy(plan)
        # Every context is read before anything is written: a row may not lean on another row of its step.
        contexts = [self.read_context(row) for row in plan.scheduled]
        sampled = [self.compute(row, last) for row, last in zip(plan.scheduled, contexts, strict=True)]
        runs = [run for run in sampled if run is not None]
        tokens = tuple(token for run in runs for token in run)
        drafts = any(row.num_draft_tokens for row in plan.scheduled)
        looks = tuple(self.looks(row) for row in plan.scheduled if row.relevance_targets)
        if plan.early_exit:
            self.leave_incomplete(plan)
        return StepOutput(
            plan.number,
            tokens,
            tuple(TokenLogprobs(0.0, ()) for _ in tokens),
            relevance=looks,
            num_tokens=tuple(map(len, runs)) if drafts else (),
        )

    def leave_incomplete(self, plan: StepPlan) -> None:
        """What a early-exit step computes has not passed all layers: whoever reads it breaks the chain."""
        assert sum(row.num_tokens for row in plan.scheduled) <= self.limits.early_exit.max_tokens
        for row in plan.scheduled:
            assert row.relevance_targets, "a brief step has a row that does not look"
            assert not row.sample, "a token would be sampled from what has not passed all layers"
            assert not row.spans, "a view's tokens would be computed twice"
            for index in range(row.start, row.start + row.num_tokens):
                self.cells[self.place(row.slot, index)] = Cell(HALF, HALF)
        self.early_exits += 1

    def looks(self, row: ScheduledSequence) -> tuple[RelevanceMaps, ...]:
        """From the cells of the views, wherever they were computed, and that of the question's end."""
        assert not row.sample, "a row that looks waits for what is chosen"
        last = row.start + row.num_tokens - 1
        self.probed += 1
        return tuple(
            look_of(
                [
                    self.cells[self.place(row.slot, index)].value
                    for index in (*range(sight.span.start, sight.span.stop), last)
                ]
            )
            for sight in row.relevance_targets
        )

    def encode(self, encode: EncodeTask) -> None:
        """A view half way is the layers it has passed, in order, and its pixels."""
        assert not self.store.on_device(encode.key), "a view is encoded again while its features are there"
        depth, name = self.limits.encode_layers, int(encode.pixels.flat[0])
        stop = depth if encode.stop_layer is None else encode.stop_layer
        assert 0 <= encode.first_layer < stop <= depth
        passed = self.unfinished.take(encode.key) if encode.first_layer else (name,)
        assert passed == (name, *range(encode.first_layer)), "a slice does not follow the one before"
        passed += tuple(range(encode.first_layer, stop))
        self.slices += encode.stop_layer is not None
        if encode.stop_layer is None:
            self.store.put(encode.key, passed[0], encode.view.tokens * FEATURE_BYTES, encode.view.content)
            self.encoded.append(encode.key)
        else:
            assert stop < depth
            self.unfinished.keep(encode.key, passed)

    def check_budgets(self, plan: StepPlan) -> None:
        assert plan.scheduled, "a step computes something"
        assert sum(row.num_tokens for row in plan.scheduled) <= self.limits.max_step_tokens
        assert len({row.slot for row in plan.scheduled}) == len(plan.scheduled), "a row runs twice in a step"
        assert len({row.seq_id for row in plan.scheduled}) == len(plan.scheduled)
        assert all(0 <= row.slot < self.limits.max_num_seqs for row in plan.scheduled)
        keys = [encode.key for encode in plan.encodes]
        assert len(keys) == len(set(keys)), "a view is encoded twice in a step"
        patches = sum(encode.patches for encode in plan.encodes)
        assert len(keys) <= 1 or patches <= self.limits.max_encode_patches

    def swap(self, plan: StepPlan) -> None:
        """What comes in is there for the rows of the next step, unless this one waits for it: no one may
        have read it before."""
        for block, cells in self.coming:
            self.fill(block, cells)
        for block, slot in plan.swap_outs:
            self.host[slot] = self.contents(block)
        self.coming = [(block, self.host[slot]) for slot, block in plan.swap_ins]
        assert len({block for block, _ in self.coming}) == len(plan.swap_ins)
        for block, cells in self.coming:
            self.fill(block, cells if plan.await_swaps else {})
        self.coming = [] if plan.await_swaps else self.coming
        self.swapped += len(plan.swap_ins)

    def contents(self, block: int) -> dict[int, Cell]:
        offsets = range(self.limits.block_size)
        return {offset: self.cells[block, offset] for offset in offsets if (block, offset) in self.cells}

    def fill(self, block: int, cells: dict[int, Cell]) -> None:
        for offset in range(self.limits.block_size):
            self.cells.pop((block, offset), None)
        self.cells.update({(block, offset): cell for offset, cell in cells.items()})

    def copy(self, plan: StepPlan) -> None:
        sources, targets = (
            {source for source, _ in plan.block_copies},
            [target for _, target in plan.block_copies],
        )
        assert not sources & set(targets), "the order of copies would matter"
        assert all(
            self.pool.in_vision(source) == self.pool.in_vision(target) for source, target in plan.block_copies
        )
        assert len(set(targets)) == len(targets)
        for source, target in plan.block_copies:
            self.fill(target, self.contents(source))

    def read_context(self, row: ScheduledSequence) -> Cell:
        """The last cell before the row, once every cell before it is seen to continue the one before."""
        last = Cell(ROOT, ROOT)
        for index in range(row.start):
            cell = self.cells[self.place(row.slot, index)]
            assert cell.before == last.value, f"sequence {row.seq_id} reads a foreign cell at {index}"
            last = cell
        return last

    def compute(self, row: ScheduledSequence, last: Cell) -> tuple[int, ...] | None:
        """The tokens sampled: with drafts the accepted ones and one more, or none if it `declines`."""
        tokens, cells = list(row.tokens), []
        assert row.num_tokens - len(tokens) in (0, 1)
        if len(tokens) < row.num_tokens:
            tokens.append(self.last_tokens[row.slot])
        for offset, token in enumerate(tokens):
            index = row.start + offset
            place = self.place(row.slot, index)
            assert self.pool.is_writable(place[0]), (
                f"sequence {row.seq_id} writes a block that is not its own"
            )
            positions = tuple(float(axis[offset]) for axis in row.positions)
            apart = self.pool.in_vision(place[0])
            last = next_cell(last.value, self.look(row, index, token), positions, apart)
            self.cells[place] = last
            cells.append(last)
        if not row.sample:
            return None
        if row.num_draft_tokens and self.declines():
            return ()
        seed, drafts = self.entered[row.slot].seed, tokens[len(tokens) - row.num_draft_tokens :]
        run = [sample(cells[-1 - len(drafts)], seed, row.output_position)]
        for offset, draft in enumerate(drafts, 1):
            if draft != run[-1]:
                break
            run.append(sample(cells[offset - 1 - len(drafts)], seed, row.output_position + offset))
            self.accepted += 1
        self.last_tokens[row.slot] = run[-1]
        return tuple(run)

    def look(self, row: ScheduledSequence, index: int, token: int) -> int:
        for span in row.spans:
            if span.start <= index < span.stop:
                assert token == IMAGE_ID
                return visual_input(self.store.get(span.key), span.view, index - span.start)
        assert token != IMAGE_ID, "a placeholder without its view"
        return token


class Engine:
    """Scheduler and device, stepped as the engine does it: overlapped or not; `check` after every call."""

    def __init__(
        self,
        *,
        overlap: bool = False,
        prefix_caching: bool = True,
        blocks: int = 64,
        vision: int = 0,  # of the blocks
        roles: Set[Role] = VISION_SCOPES["all"],
        feature_bytes: int = 1000,
        limits: SchedulerConfig | None = None,
        slots: int = 0,
        slot_milliseconds: float = 0.0,
        host_bytes: int = 0,
        disk: DiskTier | None = None,
        pins: PinnedPrefixes | None = None,
        chooser: Choose = choose_by_hash,
        host_decisions: HostDecisions | None = None,
        drafter: Drafter | None = None,
        early_relevance: bool = False,  # overlapped: looks are heard before the next step is planned
    ) -> None:
        self.now = 0.0
        self.chooser = chooser
        self.early_relevance = early_relevance
        self.truth = CostModel(COSTS, learning=False)
        self.limits = limits or small_limits()
        self.pool = BlockPool(blocks, vision, roles)
        self.store: EncoderCache[int] = EncoderCache(
            feature_bytes, host=host_bytes, disk=disk, clock=lambda: self.now
        )
        prefix = PrefixCache(self.pool, self.limits.block_size, pins) if prefix_caching else None
        self.unfinished: PartialViews[tuple[int, ...]] = PartialViews(self.limits.max_encode_patches)
        self.lod = LodController(chooser=chooser)
        self.scheduler = Scheduler(
            self.limits,
            Caches(self.pool, prefix, self.store, self.unfinished, SwapSpace(slots, slot_milliseconds)),
            CostModel(COSTS),
            clock=lambda: self.now,
            host_decisions=self.lod if host_decisions is None else host_decisions,
            drafter=drafter,
        )
        self.device = Device(self.limits, self.pool, self.store, self.unfinished)
        self.overlap = overlap
        self.in_flight: list[tuple[StepPlan, StepOutput]] = []
        self.plans: list[StepPlan] = []
        self.deltas: dict[str, list[Delta]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request, lay_out_prompt(request))
        self.deltas[request.id] = []
        self.requests[request.id] = request
        self.scheduler.check()

    def cancel(self, name: str) -> None:
        self.take(self.scheduler.cancel(name))

    def take(self, deltas: list[Delta]) -> None:
        self.scheduler.check()
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)

    def step(self) -> StepPlan | None:
        """Plan and launch one step; learn the result of it, or when overlapped of the one before."""
        self.take(self.scheduler.poll())
        self.apply_early_relevance()
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.now += STEP_SECONDS
        if plan is not None:
            failed = self.device.begin(plan)
            if failed:
                plan, told = self.scheduler.fail_views(plan, failed)
                self.take(told)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        elif not self.in_flight:
            ended = self.scheduler.poll()
            self.take(ended)
            waits = self.store.has_pending_reads or ended
            assert self.scheduler.idle or waits, "nothing runs, nothing is in flight, and somebody waits"
        if self.in_flight and (plan is None or len(self.in_flight) > self.overlap):
            oldest, result = self.in_flight.pop(0)
            took = self.truth.predict(work_of(oldest, self.limits.encode_layers)) / 1e3
            self.take(self.scheduler.apply(oldest, result, took if result.tokens else None))
        return plan

    def apply_early_relevance(self) -> None:
        """What the step in flight saw, unless it does nothing but look: then its result is as soon there."""
        if self.in_flight and self.early_relevance:
            plan, result = self.in_flight[-1]
            if result.relevance and not plan.early_exit:
                self.take(self.scheduler.apply_relevance(plan, result.relevance))

    def fail(self) -> None:
        """The step launched last cannot be run after all."""
        if self.in_flight:
            self.take(self.scheduler.fail(self.in_flight.pop()[0], "out of luck"))

    def run(self, steps: int = 2000, until: Callable[[], bool] | None = None) -> None:
        for _ in range(steps):
            if self.scheduler.idle or (until is not None and until()):
                return
            self.step()
        raise AssertionError(f"not done after {steps} steps")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas[name] if delta.index == index for token in delta.tokens]

    def finish(self, name: str, index: int = 0) -> str | None:
        ends = [delta.finish for delta in self.deltas[name] if delta.index == index and delta.finish]
        assert len(ends) <= 1, "a choice ends once"
        return ends[0] if ends else None

    def cached(self, name: str) -> int:
        return sum(delta.cached_tokens for delta in self.deltas[name])


def work_of(plan: StepPlan, layers: int) -> Work:
    work = Work()
    for row in plan.scheduled:
        work.add_row(row.start, row.num_tokens)
    for encode in plan.encodes:
        work.add_view(encode.patches, encode.share(layers))
    return work


def small_limits(**changes: Any) -> SchedulerConfig:
    numbers: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_step_tokens": 32,
        "max_model_len": 64,
        "block_size": 4,
        "max_encode_patches": 64,
        "max_queue": 100,
        "itl_margin": 0.0,  # costs of tests are exact
        "stretch": 1.0,  # and their targets stand, however long somebody waits
        **changes,
    }
    return SchedulerConfig(**numbers)
