"""Hugging Face transformers as a peer: its own `generate`, its own image processor.

takes   questions as token ids with one placeholder per picture
gives   greedy answers, one request at a time or as one batch padded on the left
never   is imported unless a peer is asked for: transformers is no dependency of the engine
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.engine.memory import DTYPES
from saccade.tools.bench.session import Question


class Peer:
    def __init__(self, checkpoint: Checkpoint, device: str, dtype: str) -> None:
        self.name = "transformers"  # its version is among the report's
        self._image_token = checkpoint.image_token_id
        self._merge = checkpoint.image.merge_size if checkpoint.image is not None else 1
        visual = "vision_config" in checkpoint.config
        kind = transformers.AutoModelForImageTextToText if visual else transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(checkpoint.path, dtype=DTYPES[dtype]).to(device).eval()
        self._device = torch.device(device)
        self._processor = None
        if visual:
            # Pillow's resize is the one our own is held to; the other backend differs in the last bits.
            self._processor = transformers.AutoImageProcessor.from_pretrained(checkpoint.path, backend="pil")
        self._pad = checkpoint.eos_ids[0] if checkpoint.eos_ids else 0
        # Nothing of the checkpoint's sampling; no end token, so that every answer has its full length.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=self._pad, use_cache=True
        )

    def one_at_a_time(self, questions: Sequence[Question], output_tokens: int) -> list[list[int]]:
        return [self._generate([question], output_tokens)[0] for question in questions]

    def padded_batch(self, questions: Sequence[Question], output_tokens: int) -> list[list[int]]:
        return self._generate(questions, output_tokens)

    @torch.inference_mode()
    def _generate(self, questions: Sequence[Question], output_tokens: int) -> list[list[int]]:
        inputs = {name: value.to(self._device) for name, value in self._inputs(questions).items()}
        output = self._model.generate(**inputs, max_new_tokens=output_tokens)
        answers: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
        return answers

    def _inputs(self, questions: Sequence[Question]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        pictures = [question.picture for question in questions if question.picture is not None]
        tokens = [question.tokens for question in questions]
        if pictures and self._processor is not None:
            processed: Any = self._processor(images=pictures, return_tensors="pt")
            inputs["pixel_values"] = processed["pixel_values"]
            inputs["image_grid_thw"] = processed["image_grid_thw"]
            visual = (processed["image_grid_thw"].prod(1) // self._merge**2).tolist()
            tokens = [self._expanded(ids, count) for ids, count in zip(tokens, visual, strict=True)]
        inputs |= self._padded(tokens)
        if self._processor is not None:
            inputs["mm_token_type_ids"] = inputs["input_ids"].eq(self._image_token or -1).long()
        return inputs

    def _expanded(self, tokens: list[int], visual: int) -> list[int]:
        place = tokens.index(self._image_token) if self._image_token is not None else 0
        return tokens[:place] + [tokens[place]] * visual + tokens[place + 1 :]

    def _padded(self, tokens: Sequence[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, tokens))
        ids = torch.full((len(tokens), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(tokens):
            ids[row, width - len(one) :] = torch.tensor(one)
            mask[row, width - len(one) :] = 1
        return {"input_ids": ids, "attention_mask": mask}
