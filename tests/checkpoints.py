"""Tiny random checkpoints, saved by transformers: complete folders that every test may open.

Deterministic from the seed. The weights are wide (see `_spread`), so that logits are far from ties, outputs
depend on the whole context, and equality of greedy tokens is a robust test; special tokens have small head
rows, so that greedy outputs run to their length instead of meeting an end token.

    folder = qwen3_vl(tmp_path / "vl")            also tied=True; qwen3(...), llama(..., scaled=True)
    inputs = oracle_inputs(folder, messages, pictures)      what transformers takes for the same question
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added, yet shown as text
VOCAB_SIZE = 512  # a little more than the tokenizer has, as in public checkpoints
BYTE_PAIR_SIZE = 480
MIN_PIXELS, MAX_PIXELS = 64 * 64, 256 * 256  # 4 to 64 visual tokens a picture
MAX_POSITIONS = 4096

SPLIT_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPLIT_OTHERS = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CORPUS = """\
The eye jumps to what matters and rests there for a moment. A picture of the harbour shows three red
boats, two blue ones and a small white lighthouse on the left. How many boats are in the picture?
What colour is the house? Describe the image in one sentence. The user asks a question and the
assistant answers with care: there are twelve windows, seven of them open, and the clock on the
tower says half past nine. Read the text on the sign, then say where the cat is sitting. You are a
helpful assistant. user system assistant image video seconds the and that this with from have which
would there their about other these first where after between."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or part.type == 'video_url' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer(*more: str) -> Tokenizer:
    """Byte-level byte pairs in the Qwen manner: 480 plain tokens, then the added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{SPLIT_WORDS}|{SPLIT_OTHERS}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_PAIR_SIZE,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in PLAIN_ADDED_TOKENS])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in more])
    return tokenizer


def token_id(token: str) -> int:
    found = make_tokenizer().token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def qwen3_vl(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    experts: bool = False,
    **text_options: Any,
) -> Path:
    """Qwen3-VL: 4 decoder layers over a 4-layer ViT with DeepStack from three of them. `experts` makes it
    Qwen3-VL-MoE, whose third layer is dense."""
    tokenizer = make_tokenizer()
    text = {
        **_decoder_sizes(),
        **(EXPERTS if experts else {}),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        **text_options,
    }
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    kind = transformers.Qwen3VLForConditionalGeneration
    if experts:
        kind = transformers.Qwen3VLMoeForConditionalGeneration
    config = (transformers.Qwen3VLMoeConfig if experts else transformers.Qwen3VLConfig)(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tied,
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )
    model = kind(config)
    _save(model, folder, tokenizer, seed, dtype, max_shard_size)
    _write_processor(folder)
    return folder


EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [2],
}


def qwen3_moe(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """The weights of a token's experts add up to one, unless norm_topk_prob is turned off."""
    options = {**_decoder_sizes(), **EXPERTS, "norm_topk_prob": True, **options}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))
    _save(model, folder, make_tokenizer(), seed, torch.float32, "5GB")
    return folder


def qwen2_5_vl(folder: Path, *, tied: bool = False, seed: int = 0, **text_options: Any) -> Path:
    """Qwen2.5-VL: windows of 2 x 2 tokens in all but the second and the last of 4 vision layers."""
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 64,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 3,
        "out_hidden_size": 64,
    }
    config = transformers.Qwen2_5_VLConfig(**_qwen2_config(vision, tied, text_options))
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    _save(model, folder, make_tokenizer(), seed, torch.float32, "5GB")
    _write_processor(folder, "Qwen2VLVideoProcessor", MAX_PIXELS // 4)
    return folder


def qwen2_vl(folder: Path, *, tied: bool = False, seed: int = 0, **text_options: Any) -> Path:
    vision = {
        "depth": 4,
        "embed_dim": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 64,
    }
    config = transformers.Qwen2VLConfig(**_qwen2_config(vision, tied, text_options))
    model = transformers.Qwen2VLForConditionalGeneration(config)
    _save(model, folder, make_tokenizer(), seed, torch.float32, "5GB")
    _write_processor(folder, "Qwen2VLVideoProcessor", MAX_PIXELS // 4)
    return folder


def _qwen2_config(vision: dict[str, Any], tied: bool, text_options: dict[str, Any]) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    sizes = {name: value for name, value in _decoder_sizes().items() if name != "head_dim"}
    return {
        "text_config": {**sizes, "rope_parameters": rope, **text_options},
        "vision_config": vision,
        "tie_word_embeddings": tied,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }


def qwen3(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **options: Any,
) -> Path:
    config = transformers.Qwen3Config(**{**_decoder_sizes(), "tie_word_embeddings": tied, **options})
    _save(transformers.Qwen3ForCausalLM(config), folder, make_tokenizer(), seed, dtype, max_shard_size)
    return folder


def qwen2(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    sizes = {name: value for name, value in _decoder_sizes().items() if name != "head_dim"}
    config = transformers.Qwen2Config(**{**sizes, "tie_word_embeddings": False, **options})
    _save(transformers.Qwen2ForCausalLM(config), folder, make_tokenizer(), seed, torch.float32, "5GB")
    return folder


def mistral(folder: Path, *, window: int | None = None, seed: int = 0, **options: Any) -> Path:
    config = transformers.MistralConfig(**{**_decoder_sizes(), "sliding_window": window, **options})
    _save(transformers.MistralForCausalLM(config), folder, make_tokenizer(), seed, torch.float32, "5GB")
    return folder


def llama(
    folder: Path,
    *,
    scaled: bool = False,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **options: Any,
) -> Path:
    """Llama; scaled=True adds llama3 frequency scaling, with thresholds inside this model's frequencies."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    config = transformers.LlamaConfig(
        **{**_decoder_sizes(), "tie_word_embeddings": tied, "rope_parameters": rope, **options}
    )
    _save(transformers.LlamaForCausalLM(config), folder, make_tokenizer(), seed, dtype, max_shard_size)
    return folder


TILE = 56  # pixels of a view of the families with a fixed size: 4 x 4 patches
IDEFICS3_TOKENS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


def llava(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """LLaVA-1.5: 4 of 5 CLIP layers, 16 visual tokens an image."""
    config = transformers.LlavaConfig(
        vision_config={**_plain_vision(5), "model_type": "clip_vision_model"},
        text_config={**_decoder_sizes(), "model_type": "llama"},
        image_token_id=token_id("<|image_pad|>"),
        **options,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    _save(model, folder, make_tokenizer(), seed, torch.float32, "5GB")
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": TILE},
        "crop_size": {"height": TILE, "width": TILE},
    }
    _write_json(folder / "preprocessor_config.json", processor)
    return folder


def idefics3(folder: Path, *, seed: int = 0, smol: bool = False) -> Path:
    """Idefics3, or SmolVLM: up to 2 x 2 tiles and the whole image, 4 visual tokens each."""
    kinds = (transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration)
    if smol:
        kinds = (transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration)
    config = kinds[0](
        vision_config=_plain_vision(4),
        text_config={**_decoder_sizes(), "model_type": "llama"},
        image_token_id=token_id("<|image_pad|>"),
        scale_factor=2,
    )
    _save(kinds[1](config), folder, make_tokenizer(*IDEFICS3_TOKENS), seed, torch.float32, "5GB")
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "do_image_splitting": True,
    }
    _write_json(folder / "preprocessor_config.json", processor)
    return folder


def _plain_vision(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 14,
    }


def gemma3(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Gemma 3's text decoder: one layer of full attention after two with a window of 8 tokens, twice."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {**_decoder_sizes(), "num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 8}
    config = transformers.Gemma3TextConfig(
        **{**sizes, "query_pre_attn_scalar": 24, "rope_parameters": rope, **options}
    )
    _save(transformers.Gemma3ForCausalLM(config), folder, make_tokenizer(), seed, dtype, "5GB")
    return folder


def oracle_inputs(
    folder: Path, messages: Sequence[dict[str, Any]], pictures: Sequence[Image.Image] = ()
) -> dict[str, Tensor]:
    """The keyword arguments of transformers' model and `generate` for a chat with pictures.

    Does by hand what its processor class does, because that class also wants a video processor, which
    needs a library that has no build for every machine.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    inputs: dict[str, Tensor] = {}
    if pictures:
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        processed = processor(images=list(pictures), return_tensors="pt")
        inputs = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
        pieces = text.split("<|image_pad|>")
        if len(pieces) != len(pictures) + 1:
            raise ValueError(f"{len(pieces) - 1} places for {len(pictures)} pictures")
        text = pieces[0]
        for grid, piece in zip(inputs["image_grid_thw"], pieces[1:], strict=True):
            text += "<|image_pad|>" * (int(grid.prod()) // processor.merge_size**2) + piece
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    inputs |= {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if pictures:
        inputs["mm_token_type_ids"] = (tokens == token_id("<|image_pad|>")).int()
    return inputs


def _decoder_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
    }


def _save(
    model: Any, folder: Path, tokenizer: Tokenizer, seed: int, dtype: torch.dtype, max_shard_size: str
) -> None:
    _spread(model, seed)
    _quieten(model, tokenizer)
    end = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=end, pad_token_id=end[1], do_sample=False
    )
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_processor(
    folder: Path, video_class: str = "Qwen3VLVideoProcessor", video_pixels: int = 8 * MAX_PIXELS
) -> None:
    """`video_pixels` are the most of all frames of a video together for Qwen3-VL, of each frame before."""
    common: dict[str, Any] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    size = {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS}
    image = {**common, "size": size, "image_processor_type": "Qwen2VLImageProcessor"}
    _write_json(folder / "preprocessor_config.json", image)
    size = {"longest_edge": video_pixels, "shortest_edge": MIN_PIXELS}
    video = {**common, "size": size, "video_processor_type": video_class}
    _write_json(folder / "video_preprocessor_config.json", video)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def _spread(model: nn.Module, seed: int) -> None:
    """Fill every parameter from one generator, in name order, with about unit gain per layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        elif parameter.dim() == 1:  # norms: around 1; wider for q and k: sharp attention
            around = 1.5 if "q_norm" in name or "k_norm" in name else 1.0
            parameter.copy_(around * (1 + 0.2 * noise))
        elif "embed" in name and "patch" not in name:
            parameter.copy_(noise if "embed_tokens" in name else 0.5 * noise)
        elif name == "lm_head.weight":
            parameter.copy_(noise)
        else:
            fan_in = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
            gain = 3.0 if "patch_embed" in name else 1.5
            parameter.copy_(gain * fan_in**-0.5 * noise)


@torch.no_grad()
def _quieten(model: Any, tokenizer: Tokenizer) -> None:
    """Shrink the head rows of special tokens: they are never the likeliest."""
    head = model.get_output_embeddings().weight
    for token in SPECIAL_TOKENS:
        head[tokenizer.token_to_id(token)] *= 0.02
