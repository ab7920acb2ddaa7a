"""Draws the example images of the checkpoint folder and asks transformers about them.

python -m training.examples
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from saccade.tools.evaluation.renderer import paint

from .scenes.generate import make_scene, pack
from .scenes.words import EVAL
from .shape import FOLDER

# name, kind, width, height, level, seed, task to show
EXAMPLES = (
    ("shapes", "objects", 448, 320, 0.8, 292, ("describe", "relation", "count")),
    ("receipt", "receipt", 352, 448, 0.8, 3, ("receipt", "receipt", "count")),
    ("chart", "bars", 512, 384, 0.8, 2, ("bar_chart", "bar_chart", "yes_no")),
    ("needle", "needle", 960, 640, 1.0, 4, ("needle", "needle", "absent")),
)


class Oracle:
    """The checkpoint folder under transformers, float32 on the CPU."""

    def __init__(self) -> None:
        self.processor = AutoImageProcessor.from_pretrained(FOLDER)
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()

    @torch.no_grad()
    def ask(self, image: Any, question: str) -> str:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        seen = self.processor(images=[image], return_tensors="pt")
        pads = int(seen["image_grid_thw"].prod()) // 4
        ids = self.tokenizer(
            text.replace("<|image_pad|>", "<|image_pad|>" * pads), return_tensors="pt"
        ).input_ids
        kinds = (ids == self.model.config.image_token_id).int()
        inputs = dict(seen, input_ids=ids, mm_token_type_ids=kinds, attention_mask=torch.ones_like(ids))
        out = self.model.generate(**inputs, max_new_tokens=64, do_sample=False)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    torch.set_num_threads(2)
    oracle = Oracle()
    (FOLDER / "examples").mkdir(exist_ok=True)
    for name, kind, width, height, level, seed, tasks in EXAMPLES:
        scene = make_scene(kind, EVAL, width, height, level, seed)
        packed = pack([scene])
        image = Image.fromarray(paint(packed.rows[0], packed.ground[0], width, height))
        image.save(FOLDER / "examples" / f"{name}.png", optimize=True)
        for ask in scene.asks:
            if ask.task in tasks:
                text = oracle.ask(image, ask.question)
                mark = "right" if text == ask.answer else f"wrong, {ask.answer!r}"
                print(f"{name}.png | {ask.question} | {text} | {mark}", flush=True)


if __name__ == "__main__":
    main()
