"""Hugging Face transformers as a peer: its own tokenizer, chat template, image processor and `generate`.

takes   the questions as the engine is asked them
gives   its prompt and its greedy answer, one question at a time
never   is imported unless a peer is asked for: transformers is no dependency of the engine
"""

from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.engine.memory import DTYPES
from saccade.errors import ConfigError
from saccade.tools.evaluation.ask import Asked, without_end
from saccade.tools.evaluation.comparison import PeerAnswer
from saccade.tools.evaluation.question_set import correct


class Peer:
    def __init__(self, checkpoint: Checkpoint, device: str, dtype: str, max_tokens: int) -> None:
        if checkpoint.image_token_id is None or checkpoint.image is None:
            raise ConfigError(f"{checkpoint.name} takes no pictures")
        transformers.utils.logging.disable_progress_bar()  # stderr has our own
        self.name = "transformers"  # its version is among the report's
        self._device = torch.device(device)
        self._place = checkpoint.image_token_id
        self._merged = checkpoint.image.merge_size**2
        self._ends = frozenset(checkpoint.eos_ids)
        self._max_tokens = max_tokens
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
        # Pillow's resize is the one our own is held to; the other backend differs in the last bits.
        self._images = transformers.AutoImageProcessor.from_pretrained(checkpoint.path, backend="pil")
        kind = transformers.AutoModelForImageTextToText
        self._model = kind.from_pretrained(checkpoint.path, dtype=DTYPES[dtype]).to(device).eval()
        # Nothing of the checkpoint's sampling: greedy until an end token.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=list(checkpoint.eos_ids) or None,
            pad_token_id=checkpoint.eos_ids[0] if checkpoint.eos_ids else 0,
            use_cache=True,
        )

    @torch.inference_mode()
    def answer(self, asked: Asked) -> PeerAnswer:
        text = self._prompt(asked)
        seen = self._images(images=[Image.fromarray(asked.image)], return_tensors="pt")
        visual = int(seen["image_grid_thw"].prod()) // self._merged
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        output = self._model.generate(
            **self._inputs(ids, visual, seen), max_new_tokens=self._max_tokens, do_sample=False
        )
        new = output[0, len(ids) - 1 + visual :].tolist()
        tokens = without_end(new, self._ends)
        said = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return PeerAnswer(
            prompt=tuple(ids),
            visual_tokens=visual,
            token_ids=tokens,
            text=said,
            right=correct(asked.example, said),
        )

    def _prompt(self, asked: Asked) -> str:
        content = [{"type": "image"}, {"type": "text", "text": asked.text}]
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text

    def _inputs(self, ids: list[int], visual: int, seen: Any) -> dict[str, Tensor]:
        """By hand what its processor class does: that one also wants a video processor, whose library has no
        build for every machine."""
        place = ids.index(self._place)
        tokens = torch.tensor([ids[:place] + [self._place] * visual + ids[place + 1 :]])
        self._model.rope_deltas = None  # of the question before
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": tokens.eq(self._place).long(),
            "pixel_values": seen["pixel_values"],
            "image_grid_thw": seen["image_grid_thw"],
        }
        return {name: value.to(self._device) for name, value in inputs.items()}
