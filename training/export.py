"""Writes the checkpoint folder from trained weights: bf16 model, relevance head, config with the section of
our own.

python -m training.export weights.pt    (a file of training.run; without one: fresh weights, for wiring)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from saccade.tools.evaluation.renderer import SHAPES

from . import ROOT
from .model import Heads, Model, initialise
from .scenes.scene import COLOUR_NAMES
from .shape import FOLDER, Shape, config, token_ids
from .views import GLOBAL, UNIT, ZOOMS

HEADS = ROOT / "training/heads.safetensors"
RELEVANCE = ("question.weight", "place.weight", "relevance_norm.weight")


def saccade_section(shape: Shape) -> dict[str, Any]:
    """What the engine needs beyond transformers' config. training/README.md explains every key."""
    return {
        "views": {
            "trained": True,
            "positions": "registered",
            "frame": "native_grid",
            "global_tokens": list(GLOBAL),
            "zoom_tokens": sorted({wide * high // UNIT**2 for wide, high in ZOOMS}),
            "zoom_grids": sorted({(high // UNIT, wide // UNIT) for wide, high in ZOOMS}),
            "most_views": 4,
            "placement": "after_question",
        },
        "relevance": {
            "file": "relevance.safetensors",
            "layer": shape.relevance_layer,
            "question_token": "last_question",
            "score": "softmax over tokens of question(norm(h_question)) . place(norm(h_token)) / sqrt(width)",
            "width": shape.relevance_width,
        },
    }


def write(state: dict[str, Tensor], heads: dict[str, Tensor], shape: Shape) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in state.items()},
        str(FOLDER / "model.safetensors"),
        metadata={"format": "pt"},
    )
    save_file(
        {k: heads[k].detach().to("cpu", torch.bfloat16).contiguous() for k in RELEVANCE},
        str(FOLDER / "relevance.safetensors"),
    )
    save_file(
        {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in heads.items()}, str(HEADS)
    )  # not shipped
    for path in (FOLDER / "model.safetensors", FOLDER / "relevance.safetensors", HEADS):
        path.chmod(0o644)
    (FOLDER / "config.json").write_text(json.dumps(config(shape, saccade_section(shape)), indent=2) + "\n")
    ids = token_ids()
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "max_new_tokens": 64,
    }
    (FOLDER / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    shape = Shape()
    if len(sys.argv) > 1:
        saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
        model, heads = saved["model"], saved["heads"]
    else:
        torch.manual_seed(0)
        fresh, fresh_heads = Model(shape), Heads(shape, len(SHAPES), len(COLOUR_NAMES))
        initialise(fresh, shape.depth)
        initialise(fresh_heads, shape.depth)
        model, heads = fresh.state_dict(), fresh_heads.state_dict()
    write(model, heads, shape)
    print(
        sum(v.numel() for v in model.values()),
        "parameters,",
        (FOLDER / "model.safetensors").stat().st_size,
        "bytes",
    )


if __name__ == "__main__":
    main()
