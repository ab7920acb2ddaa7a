"""Hugging Face transformers as a peer: its tokenizer, chat template, image processor and `generate`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.engine.memory import DTYPES
from saccade.tools.bench.workloads import Prompt
from saccade.tools.evaluation.command import until_end


class PeerOutput(NamedTuple):
    token_ids: list[int]  # up to the first end token, if the peer stops there
    visual_tokens: int


class TransformersPeer:
    def __init__(self, checkpoint: Checkpoint, device: str, dtype: str, *, stop_at_end: bool) -> None:
        transformers.utils.logging.disable_progress_bar()  # stderr has our own
        self.name = "transformers"
        self._device = torch.device(device)
        self._image_token = checkpoint.image_token_id
        self._merged = checkpoint.image.merge_size**2 if checkpoint.image is not None else 1
        self._end_ids = frozenset(checkpoint.eos_ids) if stop_at_end else frozenset()
        self._pad = checkpoint.eos_ids[0] if checkpoint.eos_ids else 0
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
        self._images = None
        kind = transformers.AutoModelForCausalLM
        if "vision_config" in checkpoint.config:
            kind = transformers.AutoModelForImageTextToText
            # Our resize is tested against Pillow's; the other backend differs in the last bits.
            self._images = transformers.AutoImageProcessor.from_pretrained(checkpoint.path, backend="pil")
        self._model = kind.from_pretrained(checkpoint.path, dtype=DTYPES[dtype]).to(device).eval()
        # Greedy, without the checkpoint's sampling defaults.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=sorted(self._end_ids) or None,
            pad_token_id=self._pad,
            use_cache=True,
        )

    def chat_tokens(self, text: str) -> list[int]:
        """The prompt of a user's message with one image before `text`."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        tokens: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[PeerOutput]:
        """Greedy; several prompts run as one batch, padded on the left."""
        inputs, visual = self._inputs(prompts)
        moved = {name: value.to(self._device) for name, value in inputs.items()}
        self._model.rope_deltas = None  # left from the call before
        output = self._model.generate(**moved, max_new_tokens=max_tokens, do_sample=False)
        answers = output[:, moved["input_ids"].shape[1] :].tolist()
        return [
            PeerOutput(until_end(tokens, self._end_ids), count)
            for tokens, count in zip(answers, visual, strict=True)
        ]

    def _inputs(self, prompts: Sequence[Prompt]) -> tuple[dict[str, Tensor], list[int]]:
        """What transformers' processor class makes. That class also needs a video processor, whose library is
        not built for every machine."""
        inputs: dict[str, Tensor] = {}
        images = [prompt.image for prompt in prompts if prompt.image is not None]
        tokens, visual = [prompt.tokens for prompt in prompts], [0] * len(prompts)
        if images and self._images is not None:
            processed: Any = self._images(images=images, return_tensors="pt")
            inputs["pixel_values"] = processed["pixel_values"]
            inputs["image_grid_thw"] = processed["image_grid_thw"]
            visual = (processed["image_grid_thw"].prod(1) // self._merged).tolist()
            tokens = [self._expand(ids, count) for ids, count in zip(tokens, visual, strict=True)]
        inputs |= self._pad_left(tokens)
        if self._images is not None:
            inputs["mm_token_type_ids"] = inputs["input_ids"].eq(self._image_token or -1).long()
        return inputs, visual

    def _expand(self, tokens: list[int], visual: int) -> list[int]:
        """With the image's placeholder repeated for each visual token."""
        index = tokens.index(self._image_token) if self._image_token is not None else 0
        return tokens[:index] + [tokens[index]] * visual + tokens[index + 1 :]

    def _pad_left(self, tokens: Sequence[list[int]]) -> dict[str, Tensor]:
        width = max(map(len, tokens))
        ids = torch.full((len(tokens), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(tokens):
            ids[row, width - len(one) :] = torch.tensor(one)
            mask[row, width - len(one) :] = 1
        return {"input_ids": ids, "attention_mask": mask}


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
