"""Runs step plans on the device: swaps, encodes, forward pass, sampling. It decides nothing."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.encoder_runner import EncoderRunner, merge_embeddings
from saccade.kernels.cuda_graph import Replay
from saccade.kernels.jit import compile_only, compiling
from saccade.kernels.sampling.slot_state import advance_slots
from saccade.kv_cache.swap_copies import HostPages
from saccade.lod.relevance_pass import RelevancePass, RelevanceTransfer
from saccade.lod.types import RelevanceMaps
from saccade.models.interface import LanguageModel
from saccade.sampling.penalties import send
from saccade.sampling.sampler import HostSample, SampleOutput, Sampler
from saccade.step_plan import ScheduledSequence, StepOutput, StepPlan
from saccade.worker.buckets import SplitBatch, StepShape
from saccade.worker.cuda_graphs import StepGraphCache
from saccade.worker.input_batch import InputBatch, ModelInputs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs, or has run, on the device (`executor.StepFuture`)."""

    plan: StepPlan
    sample: HostSample | None  # None if no sequence sampled
    relevance: RelevanceTransfer | None = None  # None if no relevance was computed
    is_graph: bool = False

    @property
    def done(self) -> bool:
        """Whether the device is known to be done with it."""
        results = [one for one in (self.sample, self.relevance) if one is not None]
        return bool(results) and all(one.ready for one in results)

    @property
    def has_relevance(self) -> bool:
        return self.relevance is not None

    def wait_relevance(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        """Per sequence with relevance targets, the maps of each target."""
        return () if self.relevance is None else self.relevance.wait()

    def wait(self) -> StepOutput:
        relevance = self.wait_relevance()
        if self.sample is None:
            return StepOutput(self.plan.number, (), (), relevance=relevance)
        tokens, logprobs = self.sample.wait()
        return StepOutput(
            self.plan.number, tuple(tokens), tuple(logprobs), self.sample.nonfinite(), relevance
        )


@dataclass(frozen=True)
class VisionParts:
    """What a model with a vision tower needs besides the language model."""

    encoder: EncoderRunner
    cache: EncoderCache[Tensor]
    relevance: RelevancePass
    depth_levels: int  # DeepStack levels of the features


class ModelRunner:
    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        sampler: Sampler,
        vision: VisionParts | None = None,
        graphs: StepGraphCache | None = None,  # None: every step runs eagerly
        host_pages: HostPages | None = None,  # of KV swap
    ) -> None:
        self._model, self._batch, self._sampler = model, batch, sampler
        self._vision, self._graphs, self._host_pages = vision, graphs, host_pages
        self.graph_replays = 0

    @property
    def max_context(self) -> int:
        return self._batch.max_context

    @torch.inference_mode()
    def encode(self, plan: StepPlan) -> dict[bytes, str]:
        """The plan's swaps and encodes, which come before its sequences. Returns the reason of failure by
        view key."""
        host = self._host_pages
        if host is not None and (plan.swap_outs or plan.swap_ins or host.pending):
            host.swap(plan.swap_outs, plan.swap_ins, wait=plan.await_swaps)
        if self._vision is None:
            return {}
        if any(one.relevance_targets for one in plan.scheduled):
            self._start_image_maps(plan, self._vision.relevance)
        if not plan.encodes:
            return {}
        contents = {encode.key: encode.view.content for encode in plan.encodes}
        made, failed = self._vision.encoder.try_encode(plan.encodes)
        for key, features in made.items():
            self._vision.cache.put(key, features, features.nbytes, contents[key])
        return failed

    def _start_image_maps(self, plan: StepPlan, relevance: RelevancePass) -> None:
        """For speed alone: maps that fail here are computed again, and fail then, with the relevance."""
        try:
            relevance.start_image_maps(plan.scheduled)
        except Exception as error:  # of any type: kernels that do not compile raise their own
            reason = str(error).partition("\n")[0]
            log.warning("step %d could not compute its image maps early: %s", plan.number, reason)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> LaunchedStep:
        """Launch the rest of the plan."""
        for entry in plan.new_slots:
            self._batch.slots.reset(entry.slot)
        if plan.early_exit:  # samples nothing: the device need not wait for the sampling parameters
            launched = self._run(plan)
            self._sampler.enter(*plan.new_slots)
            return launched
        self._sampler.enter(*plan.new_slots)
        return self._run(plan)

    def _run(self, plan: StepPlan) -> LaunchedStep:
        if not plan.scheduled:
            self._batch.apply_updates(plan)
            return LaunchedStep(plan, None)
        if self._graphs is not None:
            found = self._graphs.find(plan.scheduled, early_exit=plan.early_exit)
            if found is not None:
                return self._run_graph(plan, self._graphs, *found)
        return self._run_eager(plan)

    def _run_eager(self, plan: StepPlan) -> LaunchedStep:
        inputs = self._batch.build_inputs(plan)
        hidden, relevance = self._forward(inputs, early_exit=plan.early_exit)
        if not inputs.sampled:
            self._batch.store_outputs(inputs, inputs.sample_slots)
            return LaunchedStep(plan, None, relevance)
        logits = self._model.logits(hidden[inputs.sample_at])
        sampled = self._sampler.sample(logits, inputs.sampled, inputs.sample_slots, inputs.output_positions)
        self._batch.store_outputs(inputs, sampled.tokens)
        return LaunchedStep(plan, sampled.to_host(), relevance)

    def _forward(
        self, inputs: ModelInputs, *, early_exit: bool = False
    ) -> tuple[Tensor, RelevanceTransfer | None]:
        """Hidden states [T, hidden]; of no use with `early_exit`, which ends below the last layers."""
        embeds, vision = self._model.embed(inputs.tokens), self._vision
        scheduled = inputs.scheduled
        if vision is None or not any(one.spans or one.relevance_targets for one in scheduled):
            return self._model(embeds, inputs.positions, inputs.paged, None), None
        deep = merge_embeddings(embeds, scheduled, vision.cache.get, vision.depth_levels)
        # A checkpoint with a relevance head stores vectors of every view that a question may ask about.
        stores = vision.relevance.stores_view_vectors
        if not any(one.relevance_targets or (stores and _has_target(one)) for one in scheduled):
            return self._model(embeds, inputs.positions, inputs.paged, deep), None
        tap = vision.relevance.tap(scheduled)
        stop = vision.relevance.num_layers if early_exit else None
        hidden: Tensor = self._model(embeds, inputs.positions, inputs.paged, deep, tap, stop)
        return hidden, vision.relevance.after_forward(scheduled, inputs.positions, inputs.paged, tap)

    def _run_graph(
        self, plan: StepPlan, graphs: StepGraphCache, split: SplitBatch, shape: StepShape, replay: Replay
    ) -> LaunchedStep:
        step = graphs.step
        lines = step.fill_inputs(plan, split, shape, self._batch)
        if shape.has_visual and self._vision is not None:
            step.load_features(split.prefills, shape, self._vision.cache.get)
        replay()
        self.graph_replays += 1
        relevance = None
        if self._vision is not None and split.has_relevance_targets:
            tables = [self._batch.slots.state.tables[one.slot] for one in split.prefills]
            states, positions = step.last_hidden_states(shape)
            relevance = self._vision.relevance.compute(split.prefills, list(states), positions, tables)
        sampled = [one for one in plan.scheduled if one.sample]
        if shape.ending == "logits":
            sample = self._sample_logits(graphs, shape, sampled, lines)
            return LaunchedStep(plan, sample, relevance, is_graph=True)
        if not sampled:
            return LaunchedStep(plan, None, relevance, is_graph=True)
        count = shape.lines if lines is not None else len(sampled)
        output = SampleOutput(step.tokens[:count], step.finite[:count], (None,) * len(sampled), None)
        return LaunchedStep(plan, output.to_host(lines), relevance, is_graph=True)

    def _sample_logits(
        self,
        graphs: StepGraphCache,
        shape: StepShape,
        sampled: list[ScheduledSequence],
        lines: tuple[int, ...] | None,
    ) -> HostSample:
        """Sample after a graph that ends in logits, because a sequence asks for more than graphs can do."""
        step = graphs.step
        logits, slots, outputs = step.logits(shape), step.all_slots(shape), step.output_positions(shape)
        which: slice | Tensor = slice(len(sampled))
        if lines is not None:
            which = send(torch.tensor(lines), logits.device)
        output = self._sampler.sample(logits[which].float(), sampled, slots[which].long(), outputs[which])
        tokens = step.tokens[: len(slots)]
        tokens[which] = output.tokens
        advance_slots(slots, tokens, self._batch.slots.state, self._model.mode)
        return output.to_host()

    @torch.inference_mode()
    def prefetch_images(self, plan: StepPlan) -> None:
        """Upload the images that the plan scores: zoomed views may be cut from them next."""
        if self._vision is not None:
            for target in [target for one in plan.scheduled for target in one.relevance_targets]:
                self._vision.encoder.prefetch_pixels(target.pixels, target.span.view.content)

    @torch.inference_mode()
    def compile_step(self, scheduled: Sequence[ScheduledSequence], *, draws: bool = True) -> None:
        """Compile what an eager step launches; none of it runs. Only while there is no request: it uses
        slots. `draws`: random sampling too, which takes the compiler longest."""
        self._sampler.clear_slots()
        with compile_only():
            inputs = self._batch.build_inputs(StepPlan(0, (), (), (), (), tuple(scheduled)))
            mode = self._model.mode._replace(compile_only=True)
            embeds = self._model.embed(inputs.tokens)
            hidden = self._model(embeds, inputs.positions, inputs.paged, None, mode=mode)
            logits = self._model.logits(hidden[inputs.sample_at])
            self._sampler.sample(logits, scheduled, inputs.sample_slots, inputs.output_positions)
            if draws and compiling():
                slots, outputs = inputs.sample_slots.to(torch.int32), inputs.output_positions
                self._sampler.draw(logits.contiguous(), slots, outputs.contiguous())


def _has_target(scheduled: ScheduledSequence) -> bool:
    return any(span.is_target for span in scheduled.spans)
