"""Writes a model folder without weights: the shapes of a public checkpoint, for `--load-format dummy`.

    python3 bench/shapes.py qwen3-vl-8b /tmp/qwen3-vl-8b
    saccade bench /tmp/qwen3-vl-8b --load-format dummy

The folder has config.json, tokenizer, chat template and processor settings. The tokenizer is made up: every
id of the vocabulary decodes to some letters, so streams of random tokens are visible, and text is read byte
by byte. Special tokens stand at the ids of the public tokenizer.
"""

import argparse
import json
import string
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 151_936  # rows of the embedding table
FIRST_SPECIAL = 151_643
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIALS)}

# name -> what differs between the sizes.
TEXT: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "qwen3-vl-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "qwen3-vl-8b": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def config(name: str) -> dict[str, Any]:
    text, vision = TEXT[name], VISION[name]
    tied = text["tie_word_embeddings"]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "vocab_size": VOCAB,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "bos_token_id": IDS["<|endoftext|>"],
            "eos_token_id": IDS["<|im_end|>"],
            "rope_theta": 5_000_000,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "num_position_embeddings": 2304,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
    }


def processor(longest: int, shortest: int, **kind: str) -> dict[str, Any]:
    return {
        "size": {"longest_edge": longest, "shortest_edge": shortest},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **kind,
    }


def tokenizer() -> Tokenizer:
    """The 256 bytes, then made-up syllables no text is ever read as, then the special tokens at their ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = ("".join(four) for four in product(string.ascii_lowercase, repeat=4))
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    while len(vocabulary) < FIRST_SPECIAL:
        vocabulary[next(syllables)] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return made


def write(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    image = processor(16_777_216, 65_536, image_processor_type="Qwen2VLImageProcessorFast")
    video = processor(25_165_824, 4_096, video_processor_type="Qwen3VLVideoProcessor")
    files = {
        "config.json": config(name),
        "generation_config.json": {"eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": video,
    }
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer().save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model folder without weights.")
    parser.add_argument("name", choices=sorted(TEXT))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write(given.name, given.folder)
    print(given.folder)


if __name__ == "__main__":
    main()
