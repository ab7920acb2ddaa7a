"""Calibration prompts, and running them through a model part by part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.encoder.encoder_runner import EncoderRunner, merge_embeddings
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import ConfigError
from saccade.inputs.processor import InputProcessor
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Pages
from saccade.models.interface import LanguageModel, Layout, VisionTower
from saccade.request import Request
from saccade.sampling_params import SamplingParams
from saccade.step_plan import BlockTableEntry, EncodeTask, ScheduledSequence, StepPlan
from saccade.tools.evaluation.question_set import PER_TASK, TASKS, example
from saccade.tools.quantize.options import QuantizeOptions
from saccade.worker.input_batch import InputBatch, Slots

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
DEFAULT_PROMPT = "Describe the image."
STRIDE = 7  # between questions of a task; prime to the 200 of them
TEXT_SHARE = 4  # one in so many drawn prompts has no image
LONGEST_PROMPT = 16384
STEP_TOKENS = 4096  # of prompts that run together; a longer one runs alone
BLOCK_SIZE = 16


def calibration_requests(options: QuantizeOptions, checkpoint: Checkpoint) -> list[Request]:
    longest = min(checkpoint.max_position_embeddings, LONGEST_PROMPT)
    processor = InputProcessor(checkpoint, longest)
    with_images = checkpoint.image is not None and checkpoint.image_token_id is not None
    if options.calibration is None:
        prompts = _drawn_prompts(options.samples, with_images=with_images)
    else:
        prompts = _folder_prompts(Path(options.calibration), options.samples, with_images=with_images)
    once = SamplingParams(max_tokens=1)
    requests = []
    try:
        for number, (image, text, answer) in enumerate(prompts):
            parts = [] if image is None else [{"type": "image", "image": image}]
            message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
            if checkpoint.chat_template is None:
                request = processor.prepare_prompt(text, once, str(number), trusted=True)
            else:
                request = processor.prepare_chat([message], once, str(number), trusted=True)
            prompt = (*request.prompt, *processor.tokenizer.encode_plain(answer))
            requests.append(msgspec.structs.replace(request, prompt=prompt))
    finally:
        processor.close()
    return requests


Prompt = tuple[Image.Image | None, str, str]  # image, text, and the beginning of the answer


def _drawn_prompts(count: int, *, with_images: bool) -> Iterator[Prompt]:
    for number in range(count):
        round_, task = divmod(number, len(TASKS))
        one = example(TASKS[task], (STRIDE * round_ + STRIDE // 2) % PER_TASK)
        shown = with_images and (number + round_) % TEXT_SHARE != TEXT_SHARE - 1
        yield Image.fromarray(one.image) if shown else None, one.question, one.answer


def _folder_prompts(folder: Path, count: int, *, with_images: bool) -> Iterator[Prompt]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    images = {file.stem: file for file in files if file.suffix.lower() in IMAGE_SUFFIXES}
    texts = {file.stem: file for file in files if file.suffix.lower() == ".txt"}
    names = sorted({*(images if with_images else ()), *texts})
    if not names:
        needed = f"images ({', '.join(IMAGE_SUFFIXES)}) or .txt prompts" if with_images else ".txt prompts"
        raise ConfigError(f"{folder} has no {needed}; give --calibration another folder")
    for name in names[:count]:
        text = texts[name].read_text(encoding="utf-8").strip() if name in texts else ""
        image = None
        if with_images and name in images:
            with Image.open(images[name]) as opened:
                image = opened.convert("RGB")
        yield image, text or DEFAULT_PROMPT, ""


@dataclass
class _EncodedImage:
    """An image between two layers of the vision tower."""

    layout: Layout
    stream: Tensor  # [P, hidden]
    levels: list[Tensor]  # DeepStack levels so far


class Calibration:
    """Runs the requests through one layer of the vision tower, or through the first layers of the decoder."""

    def __init__(self, model: LanguageModel, checkpoint: Checkpoint, requests: Sequence[Request]) -> None:
        self._model = model
        self._images: dict[bytes, _EncodedImage] = {}
        self._layer = 0  # of the vision tower, that the images are in front of
        self._features: dict[bytes, Tensor] | None = None
        device = next(model.parameters()).device
        if model.vision is not None and checkpoint.image is not None:
            self._begin(
                model.vision, EncoderRunner(model.vision, checkpoint.image, device, model.dtype), requests
            )
        self._plans = _plans(requests)
        most = max((len(plan.scheduled) for plan in self._plans), default=1)
        blocks = max((len(plan.block_table_updates) for plan in self._plans), default=1)
        pages = Pages.allocate(
            single_group(model.kv_cache_groups, BLOCK_SIZE), blocks, device, mode=model.mode
        )
        self._batch = InputBatch(pages, Slots(most, blocks, device))

    @torch.inference_mode()
    def _begin(self, tower: VisionTower, encoder: EncoderRunner, requests: Sequence[Request]) -> None:
        for item in (item for request in requests for item in request.media):
            view, key = item.view, item.view.key
            if key not in self._images:
                layout = tower.layout([view.grid])
                patches = encoder.preprocess([EncodeTask(view, key, item.pixels)])
                self._images[key] = _EncodedImage(layout, tower.begin(patches, layout), [])

    @torch.inference_mode()
    def encode(self, layer: int | None) -> None:
        """Run one layer of the vision tower with its DeepStack merger, or the last merger (None). The layers
        before it run once, with the weights they have then."""
        tower = self._model.vision
        if tower is None:
            return
        self._advance(tower, tower.depth if layer is None else layer)
        for image in self._images.values():
            if layer is None:
                tower.finish(image.stream, image.levels)
            else:
                tower.carry(image.stream, image.layout, layer, layer + 1)

    def _advance(self, tower: VisionTower, layer: int) -> None:
        for image in self._images.values():
            image.stream, levels = tower.carry(image.stream, image.layout, self._layer, layer)
            image.levels += levels
        self._layer = layer

    @torch.inference_mode()
    def decode(self, layers: int | None = None) -> Iterator[tuple[StepPlan, Tensor]]:
        """Run the first `layers` of the decoder, or all; gives the hidden states of each step. The images are
        encoded once."""
        model, tower = self._model, self._model.vision
        if self._features is None:
            self._features = {}
            if tower is not None:
                self._advance(tower, tower.depth)
                for key, image in self._images.items():
                    self._features[key] = tower.finish(image.stream, image.levels)
        levels = 0 if tower is None else tower.depth_levels
        for plan in self._plans:
            inputs = self._batch.build_inputs(plan)
            embeds = model.embed(inputs.tokens)
            deep = merge_embeddings(embeds, plan.scheduled, self._features.__getitem__, levels)
            yield plan, model(embeds, inputs.positions, inputs.paged, deep, None, layers)


def _plans(requests: Sequence[Request]) -> list[StepPlan]:
    plans: list[StepPlan] = []
    rows: list[ScheduledSequence] = []
    for layout in map(lay_out_prompt, requests):
        count = len(layout.tokens)
        if rows and sum(row.num_tokens for row in rows) + count > STEP_TOKENS:
            plans.append(_plan(rows))
            rows = []
        slot = len(rows)
        rows.append(
            ScheduledSequence(slot, slot, 0, count, layout.tokens, layout.positions, layout.spans, False, 0)
        )
    return [*plans, _plan(rows)] if rows else plans


def _plan(rows: Sequence[ScheduledSequence]) -> StepPlan:
    entries: list[BlockTableEntry] = []
    for row in rows:
        first = len(entries)
        blocks = -(-row.num_tokens // BLOCK_SIZE)
        entries += [(row.slot, index, first + index, 0) for index in range(blocks)]
    return StepPlan(0, (), tuple(entries), (), (), tuple(rows))
