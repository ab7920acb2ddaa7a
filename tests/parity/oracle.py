"""Hugging Face transformers as the oracle: what a prompt's greedy continuation must be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.request import Request
from saccade.step_plan import PromptLayout


class Oracle:
    """A checkpoint under transformers, float32, CPU, one request at a time."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self.visual = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if self.visual else transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = config
        self.images: Any = None
        if self.visual:
            self.images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def greedy(self, request: Request, pictures: Sequence[Image.Image] = (), **options: Any) -> list[int]:
        """The new tokens. `pictures` go through transformers' own processor; our layout gives the ids."""
        layout = lay_out_prompt(request)
        inputs = self._text(layout)
        if pictures:
            processed = self.images(images=list(pictures), return_tensors="pt")
            names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
            inputs |= {name: processed[name] for name in names if name in processed}
        return self._generate(inputs, request, **options)

    def greedy_video(
        self, request: Request, patches: torch.Tensor, grids: Sequence[Sequence[int]], **more: torch.Tensor
    ) -> list[int]:
        """For videos: the patches we made, and one (frames, rows, columns) grid per video."""
        inputs = self._text(lay_out_prompt(request))
        inputs["pixel_values_videos"] = patches
        inputs["video_grid_thw"] = torch.tensor(grids)
        return self._generate(inputs | more, request)

    @torch.inference_mode()
    def greedy_views(self, request: Request, patches: torch.Tensor) -> list[int]:
        """For views of any kind: the patches we made of each, in prompt order, at the layout's positions."""
        layout = lay_out_prompt(request)
        views = [span.view.grid for span in layout.spans]
        inputs = {
            **self._text(layout),
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([[1, *grid] for grid in views]),
        }
        positions = torch.from_numpy(layout.positions)[:, None]
        tokens: list[int] = []
        cache = None
        while len(tokens) < request.sampling.max_tokens:
            result = self.model(**inputs, position_ids=positions, past_key_values=cache, use_cache=True)
            tokens.append(int(result.logits[0, -1].argmax()))
            if tokens[-1] in request.sampling.stop_token_ids:
                break
            cache = result.past_key_values
            inputs = {"input_ids": torch.tensor([[tokens[-1]]])}
            positions = torch.full((3, 1, 1), float(len(layout.tokens) + len(tokens) - 1 + layout.delta))
        return tokens

    def _text(self, layout: PromptLayout) -> dict[str, torch.Tensor]:
        ids = torch.tensor([layout.tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if hasattr(self.config, "video_token_id"):
            kinds = torch.zeros_like(ids)
            kinds[ids == self.config.image_token_id] = 1
            kinds[ids == self.config.video_token_id] = 2
            inputs["mm_token_type_ids"] = kinds
        return inputs

    @torch.inference_mode()
    def _generate(self, inputs: dict[str, torch.Tensor], request: Request, **options: Any) -> list[int]:
        self.model.rope_deltas = None
        output = self.model.generate(
            **inputs, max_new_tokens=request.sampling.max_tokens, do_sample=False, **options
        )
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Smooth colours with some noise: neither flat nor pure noise survives resizing unchanged."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + rng.integers(-20, 21, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
