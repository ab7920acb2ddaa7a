"""A small byte-level tokenizer with Qwen's control tokens, a template like Qwen3-VL's, a folder of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from saccade.inputs.tokenizer import Tokenizer

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ORDINARY = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # added, but not special, as Qwen has them
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is in the picture? Describe the video, please.",
    "user assistant system\n seconds <0.5 seconds> 0.1 1.2 3.4 5.6 7.8 9.0 Hello, world! {} [] () | <| |>",
    "naïve café, Grüße, 你好世界, こんにちは, привет, 🙂🚀",
]

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEMPLATE = """\
{%- macro show(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- 'Functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + show(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@cache
def tokenizer_json() -> str:
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
    text: str = tokenizer.to_str()
    return text


@cache
def tokens() -> Tokenizer:
    return Tokenizer(tokenizer_json())


def token_id(text: str) -> int:
    found = tokens().id_of(text)
    if found is None:
        raise KeyError(text)
    return found


IMAGE: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 4096, "longest_edge": 262144},
}
VIDEO: dict[str, Any] = {
    **{key: value for key, value in IMAGE.items() if key != "image_processor_type"},
    "video_processor_type": "Qwen3VLVideoProcessor",
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}


def config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "text_config": {
            "vocab_size": tokens().vocab_size + 20,  # models pad their tables
            "max_position_embeddings": 4096,
            "eos_token_id": token_id("<|im_end|>"),
            "bos_token_id": token_id("<|endoftext|>"),
        },
        "vision_config": {"patch_size": 16},
    }


def write_checkpoint(folder: Path) -> Path:
    """Everything a front needs of a checkpoint; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": config(),
        "generation_config.json": {
            "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
        },
        "preprocessor_config.json": IMAGE,
        "video_preprocessor_config.json": VIDEO,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": {"content": "<|endoftext|>"},
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
