"""The training model and transformers give the same logits for one image and question (float32, CPU).

python -m training.parity
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from .model import Batch, Model
from .shape import FOLDER, Shape


def place_of_prefix(start: int, rows: int, columns: int) -> torch.Tensor:
    """Positions [3, start + rows * columns]: the text before an image, then its tokens."""
    text = torch.arange(start).float().expand(3, -1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = torch.stack([torch.zeros(rows * columns), y.reshape(-1), x.reshape(-1)]).float() + start
    return torch.cat([text, grid], 1)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    height, width = 224, 320
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor, tokenizer = AutoImageProcessor.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    oracle = Qwen3VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is the Date? K7"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    seen = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    pads = int(seen["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * pads), return_tensors="pt").input_ids
    inputs = dict(seen, input_ids=ids, mm_token_type_ids=(ids == oracle.config.image_token_id).int())
    shape = Shape()
    model = Model(shape).eval()
    model.load_state_dict({k: v.float() for k, v in load_file(str(FOLDER / "model.safetensors")).items()})
    ids = inputs["input_ids"][0]
    rows, columns = height // 32, width // 32
    branch = ids[4 + rows * columns :]
    steps = 4 + max(rows, columns) + torch.arange(len(branch)).float()
    batch = Batch(
        torch.from_numpy(pixels)[None],
        None,
        ids[:4],
        place_of_prefix(4, rows, columns),
        branch[None],
        None,
        steps.expand(3, 1, -1),
        torch.zeros(1, len(branch), dtype=torch.long),
    )
    with torch.no_grad():
        ours = model.logits(model(batch).hidden)
        theirs = oracle(**inputs).logits[:, -len(branch) :]
    gap = (ours - theirs).abs().max().item()
    print("largest difference", gap, "of", theirs.abs().max().item())
    assert gap < 1e-3 * max(1.0, theirs.abs().max().item())


if __name__ == "__main__":
    main()
