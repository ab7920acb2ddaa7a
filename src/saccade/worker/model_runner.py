"""The only way onto the device: launches a step, hands back a promise of its result.

takes   a StepPlan
gives   a `LaunchedStep` step; its results are where the host waits for the device
owns    the model, the pages and the rows on the device
never   decides: what runs, and in which order, is the plan's business
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.encoder_runner import EncoderRunner
from saccade.encoder.merge_embeddings import merge_embeddings
from saccade.kernels.cuda_graph import Replay
from saccade.kernels.jit import compile_only, compiling
from saccade.kernels.sampling.slot_state import advance_slots
from saccade.kv_cache.swap_copies import HostPages
from saccade.lod.relevance_pass import Lookout
from saccade.lod.relevance_transfer import HostLooks
from saccade.lod.types import RelevanceMaps
from saccade.models.interface import LanguageModel
from saccade.sampling.penalties import send
from saccade.sampling.sampler import HostSample, SampleOutput, Sampler
from saccade.step_plan import ScheduledSequence, StepOutput, StepPlan
from saccade.worker.buckets import TOKENS, Division, Shape
from saccade.worker.cuda_graphs import Graphs
from saccade.worker.graph_step import FixedStep
from saccade.worker.idle_warmup import Ahead
from saccade.worker.input_batch import Batch, Inputs
from saccade.worker.slots import DeviceRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs, or has run, on the device (`executor.StepFuture`)."""

    plan: StepPlan
    sample: HostSample | None  # None if no sequence sampled
    looks: HostLooks | None = None  # None if no relevance was computed
    is_graph: bool = False

    @property
    def done(self) -> bool:
        """Whether the device is known to be done with it."""
        results = [one for one in (self.sample, self.looks) if one is not None]
        return bool(results) and all(one.there for one in results)

    @property
    def has_relevance(self) -> bool:
        return self.looks is not None

    def wait_relevance(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        """Per sequence with relevance targets, the maps of each target."""
        return () if self.looks is None else self.looks.wait()

    def wait(self) -> StepOutput:
        relevance = self.wait_relevance()
        if self.sample is None:
            return StepOutput(self.plan.number, (), (), relevance=relevance)
        tokens, logprobs = self.sample.wait()
        return StepOutput(self.plan.number, tuple(tokens), tuple(logprobs), self.sample.unsound(), relevance)


class Rehearsal(NamedTuple):
    """A step that nobody asked for: so many answers beside a prompt."""

    decodes: int
    tokens: int = TOKENS[-1] + 1  # of the prompt: longer than captured steps hold

    def rows(self, longest: int) -> tuple[ScheduledSequence, ...]:
        """Where a context has `longest` tokens at most."""

        def row(number: int, start: int, count: int) -> ScheduledSequence:
            positions = np.zeros((3, count), dtype=np.float32)
            return ScheduledSequence(number, number, start, count, (0,) * count, positions, (), True, 0)

        return (
            *(row(number, min(640, longest - 1), 1) for number in range(self.decodes)),
            row(self.decodes, 0, min(self.tokens, longest)),
        )


class Runner:
    def __init__(
        self,
        model: LanguageModel,
        encoder: EncoderRunner | None,
        store: EncoderCache[Tensor],
        rows: DeviceRows,
        batch: Batch,
        sampler: Sampler,
        captured: tuple[FixedStep, Graphs] | None = None,  # None: every step takes the ordinary way
        host: HostPages | None = None,
        lookout: Lookout | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._store = store
        self._rows = rows
        self._batch = batch
        self._sampler = sampler
        self._captured = captured
        self._host = host
        self.replays = 0  # steps that ran captured
        self._lookout = lookout
        self._ahead = ahead
        self.rehearsals: Sequence[Rehearsal] = ()  # ordinary steps to be compiled when idle

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> dict[bytes, str]:
        """The swaps and the views of a step, which come before its rows. Gives the views that could not be
        made, by key: why. The rest of the step may still be launched, without who needs them."""
        if self._host is not None:
            self._host.swap(plan.swap_outs, plan.swap_ins, wait=plan.await_swaps)
        self._expect_looks(plan)
        return self._encode(plan)

    def _expect_looks(self, plan: StepPlan) -> None:
        """For speed alone: whoever looks comes to what failed here again, and others do not end with it."""
        if self._lookout is None or not any(row.relevance_targets for row in plan.scheduled):
            return
        try:
            self._lookout.expect(plan.scheduled)
        except Exception as error:  # whatever it is: kernels that do not compile, say, raise their own
            log.warning("step %d could not prepare its looks: %s", plan.number, str(error).partition("\n")[0])

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """All the rest of a step that was begun."""
        for entry in plan.new_slots:
            self._rows.forget(entry.slot)
        if plan.early_exit:  # nobody samples: the device need not wait for what they ask of that
            launched = self._run(plan)
            self._sampler.enter(*plan.new_slots)
            return launched
        self._sampler.enter(*plan.new_slots)
        return self._run(plan)

    def _run(self, plan: StepPlan) -> LaunchedStep:
        if not plan.scheduled:
            self._batch.change(plan)
            return LaunchedStep(plan, None)
        if self._captured is not None:
            step, graphs = self._captured
            found = graphs.find(plan.scheduled, brief=plan.early_exit)
            if found is not None:
                return self._replay(plan, step, *found)
        return self._ordinary(plan)

    @torch.inference_mode()
    def await_zooms(self, plan: StepPlan) -> None:
        """While a step runs that does nothing but look, pictures go up that views may be cut from next. No
        part of the step: its end is not theirs."""
        if plan.early_exit and self._encoder is not None:
            for sight in [sight for row in plan.scheduled for sight in row.relevance_targets]:
                self._encoder.prefetch_pixels(sight.pixels, sight.span.view.content)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """While nobody waits: something that makes later steps faster; gives whether there was anything."""
        if self._captured is not None and self._captured[1].go_on():
            return True
        if self.rehearsals:
            self._rehearse_next()
            return True
        return self._ahead is not None and self._ahead.go_on()

    @property
    def to_prepare(self) -> int:
        """What `prepare` would do in as many calls, or fewer."""
        captured = self._captured[1].to_come if self._captured is not None else 0
        return captured + len(self.rehearsals) + (len(self._ahead) if self._ahead is not None else 0)

    def _rehearse_next(self) -> None:
        """One step a call: who comes meanwhile waits for that one. What fails is compiled when it is met."""
        step, *self.rehearsals = self.rehearsals
        try:
            self.rehearse([step])
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self.rehearsals = ()
            log.warning("ordinary steps cannot be compiled ahead: %s", str(error).split("\n")[0])

    @torch.inference_mode()
    def rehearse(self, steps: Sequence[Rehearsal], *, draws: bool = True) -> None:
        """Compile what ordinary steps launch; none of it runs. Only before the first request, or while there
        is none: it pretends to have device rows. `draws`: random tokens too, which take the compiler
        longest."""
        self._sampler.vacate()
        with compile_only():
            for step in steps:
                rows = step.rows(self._batch.longest)
                inputs = self._batch.prepare(StepPlan(0, (), (), (), (), rows))
                hidden, _ = self._forward(inputs)
                logits = self._model.logits(hidden[inputs.sample_at])
                self._sampler.sample(logits, rows, inputs.sample_rows, inputs.output_positions)
                if draws and compiling():
                    asking, outputs = inputs.sample_rows.to(torch.int32), inputs.output_positions
                    self._sampler.draw(logits.contiguous(), asking, outputs.contiguous())

    def _ordinary(self, plan: StepPlan) -> LaunchedStep:
        inputs = self._batch.prepare(plan)
        hidden, looks = self._forward(inputs, brief=plan.early_exit)
        if not inputs.sampled:
            self._batch.settle(inputs, inputs.sample_rows)
            return LaunchedStep(plan, None, looks)
        logits = self._model.logits(hidden[inputs.sample_at])
        sampled = self._sampler.sample(logits, inputs.sampled, inputs.sample_rows, inputs.output_positions)
        self._batch.settle(inputs, sampled.tokens)
        return LaunchedStep(plan, sampled.to_host(), looks)

    def _replay(
        self, plan: StepPlan, step: FixedStep, divided: Division, shape: Shape, replay: Replay
    ) -> LaunchedStep:
        lines = self._batch.fill(plan, divided, shape, step)
        if shape.sighted:
            step.look(divided.chunks, shape, self._store.get)
        replay()
        self.replays += 1
        looks = None
        if self._lookout is not None and divided.looking:
            tables = [self._rows.state.tables[row.slot] for row in divided.chunks]
            states, positions = step.ends(shape)
            looks = self._lookout.compute(divided.chunks, list(states), positions, tables)
        sampled = [row for row in plan.scheduled if row.sample]
        if shape.ending == "logits":
            return LaunchedStep(plan, self._sample_logits(step, shape, sampled, lines), looks, is_graph=True)
        if not sampled:
            return LaunchedStep(plan, None, looks, is_graph=True)
        count = shape.decodes + shape.chunks if lines is not None else len(sampled)
        output = SampleOutput(step.tokens[:count], step.sound[:count], (None,) * len(sampled), None)
        return LaunchedStep(plan, output.to_host(lines), looks, is_graph=True)

    def _sample_logits(
        self, step: FixedStep, shape: Shape, sampled: list[ScheduledSequence], lines: tuple[int, ...] | None
    ) -> HostSample:
        """Where the graph leaves sampling to us: rows that ask for more than a captured step can do."""
        logits, rows, outputs = step.logits(shape), step.all_rows(shape), step.outputs(shape)
        which: slice | Tensor = slice(len(sampled))
        if lines is not None:
            which = send(torch.tensor(lines), logits.device)
        output = self._sampler.sample(logits[which].float(), sampled, rows[which].long(), outputs[which])
        tokens = step.tokens[: len(rows)]
        tokens[which] = output.tokens
        advance_slots(rows, tokens, self._rows.state, self._model.mode)
        return output.to_host()

    def _encode(self, plan: StepPlan) -> dict[bytes, str]:
        if not plan.encodes or self._encoder is None:
            return {}
        contents = {encode.key: encode.view.content for encode in plan.encodes}
        made, failed = self._encoder.try_encode(plan.encodes)
        for key, features in made.items():
            self._store.put(key, features, features.nbytes, contents[key])
        return failed

    def _forward(self, inputs: Inputs, *, brief: bool = False) -> tuple[Tensor, HostLooks | None]:
        """`brief`: up to what looks need; the hidden states it gives are then of no use."""
        model = self._model
        embeds = model.embed(inputs.tokens)
        deep = None
        if model.vision is not None:
            deep = merge_embeddings(embeds, inputs.rows, self._store.get, model.vision.depth_levels)
        lookout = self._lookout
        watch = None
        if lookout is not None and lookout.concerns(inputs.rows):
            watch = lookout.watch(inputs.rows)
        if lookout is None or watch is None:
            return model(embeds, inputs.positions, inputs.paged, deep), None
        stop = lookout.depth if brief else None
        hidden: Tensor = model(embeds, inputs.positions, inputs.paged, deep, watch, stop)
        return hidden, lookout.after_forward(inputs.rows, inputs.positions, inputs.paged, watch)
