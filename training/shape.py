"""The embedded model's dimensions, and its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from . import ROOT

FOLDER = ROOT / "src/saccade/embedded"


@dataclass(frozen=True)
class Shape:
    vit_width: int = 256
    vit_depth: int = 6
    vit_heads: int = 4
    vit_mlp: int = 1024
    positions: int = 64  # a learned 8 x 8 grid, interpolated over the image
    deepstack: tuple[int, ...] = (2,)
    width: int = 256
    depth: int = 8
    heads: int = 8
    kv_heads: int = 4
    head: int = 64
    mlp: int = 640
    vocab: int = 832
    theta: float = 1000.0
    vit_theta: float = 10000.0
    sections: tuple[int, int, int] = (12, 10, 10)  # frequencies of time, height, width
    relevance_layer: int = 4  # the head reads hidden states after this many decoder layers
    relevance_width: int = 64


def token_ids() -> dict[str, int]:
    added = json.loads((FOLDER / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def config(shape: Shape, saccade: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json as transformers writes it, with our own section for what transformers does not know."""
    ids = token_ids()
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": None,
            "head_dim": shape.head,
            "hidden_act": "silu",
            "hidden_size": shape.width,
            "initializer_range": 0.02,
            "intermediate_size": shape.mlp,
            "max_position_embeddings": 4096,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.depth,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": shape.theta,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": list(shape.sections),
            },
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.theta,
                "mrope_interleaved": True,
                "mrope_section": list(shape.sections),
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": shape.vocab,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "dtype": "bfloat16",
            "deepstack_visual_indexes": list(shape.deepstack),
            "depth": shape.vit_depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": shape.vit_width,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": shape.vit_mlp,
            "num_heads": shape.vit_heads,
            "num_position_embeddings": shape.positions,
            "out_hidden_size": shape.width,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "rope_parameters": {"rope_type": "axial", "rope_theta": shape.vit_theta},
        },
        **({"saccade": saccade} if saccade else {}),
    }
