"""The only way onto the device: launches a step, hands back a promise of its result.

takes   a StepPlan
gives   a `Launched` step; its `wait()` is the one place the host waits for the device
owns    the model, the pages and the rows on the device
never   decides: what runs, and in which order, is the plan's business
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.cache.pages import Pages
from saccade.models.layers import LanguageModel
from saccade.plan import StepPlan, StepResult
from saccade.runtime.batch import Batch, Inputs
from saccade.runtime.sampler import HostSample, Sampler
from saccade.vision.encode import Encoder
from saccade.vision.splice import splice
from saccade.vision.store import FeatureStore


@dataclass(frozen=True)
class Launched:
    """A step that runs, or has run, on the device."""

    plan: StepPlan
    sample: HostSample | None  # None when no row sampled

    def wait(self) -> StepResult:
        if self.sample is None:
            return StepResult(self.plan.number, (), ())
        tokens, logprobs = self.sample.wait()
        return StepResult(self.plan.number, tuple(tokens), tuple(logprobs), self.sample.unsound())


class Runner:
    def __init__(
        self,
        model: LanguageModel,
        encoder: Encoder | None,
        pages: Pages,
        store: FeatureStore[Tensor],
        batch: Batch,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._pages = pages
        self._store = store
        self._batch = batch
        self._sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        for entry in plan.enter:
            self._sampler.enter(entry)
        inputs = self._batch.prepare(plan)
        self._encode(plan)
        hidden = self._forward(inputs)
        if not inputs.sampled:
            return Launched(plan, None)
        logits = self._model.logits(hidden[inputs.sample_at])
        sampled = self._sampler.sample(logits, inputs.sampled, inputs.sample_rows, inputs.output_positions)
        self._batch.remember(inputs.sample_rows, sampled.tokens)
        return Launched(plan, sampled.to_host())

    def _encode(self, plan: StepPlan) -> None:
        if not plan.encodes or self._encoder is None:
            return
        contents = {encode.key: encode.view.content for encode in plan.encodes}
        for key, features in self._encoder.encode(plan.encodes).items():
            self._store.put(key, features, features.nbytes, contents[key])

    def _forward(self, inputs: Inputs) -> Tensor:
        model = self._model
        embeds = model.embed(inputs.tokens)
        deep = None
        if model.vision is not None:
            deep = splice(embeds, inputs.rows, self._store.get, model.vision.depth_levels)
        hidden: Tensor = model(embeds, inputs.positions, inputs.paged, deep)
        return hidden
