"""Makes the tokenizer: every byte, and the whole words that questions and answers are made of.

    python -m training.tokenizer

Whole words only (`ignore_merges`, no merge rules): a word outside the list, a capital-letter code or a
number falls apart into single characters, which is what reading needs. All 256 bytes are there, so no text
is refused."""

from __future__ import annotations

import json
import re
from collections import Counter

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import ByteLevel as ByteLevelProcessor

from . import ROOT
from .scenes import charts, pages, words
from .scenes.generate import KINDS as ALL_KINDS
from .scenes.generate import make_scene

FOLDER = ROOT / "src/saccade/embedded"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Kinds of scene the word list was taken from. It stays as it is: shipped weights depend on the ids.
KINDS = tuple(kind for kind in ALL_KINDS if kind != "scenery")
PIECES = r" ?[A-Z]?[a-z]+|[\s\S]"
EXTRA = [
    "user",
    "assistant",
    "system",
    "hello",
    "hi",
    "thanks",
    "thank",
    "please",
    "picture",
    "image",
    "photo",
    "what",
    "who",
    "where",
    "when",
    "why",
    "how",
    "is",
    "are",
    "the",
    "a",
    "an",
    "of",
    "and",
    "or",
    "in",
    "on",
    "at",
    "it",
    "this",
    "that",
    "i",
    "cannot",
    "can",
    "tell",
    "see",
    "not",
    "know",
    "no",
    "yes",
    "you",
    "me",
    "my",
    "sorry",
    "there",
    "here",
    "color",
    "colour",
    "shape",
    "text",
    "number",
    "word",
    "code",
]


def question_words() -> list[str]:
    """The words of questions and answers that are not the images' own content, most frequent first."""
    content = {
        w.lower()
        for group in (words.THINGS, words.NAMES, words.PLACES, words.KEYS, charts.MONTHS, pages.NOTICE)
        for w in group
    }
    seen: Counter[str] = Counter()
    for kind in KINDS:
        for seed in range(1500):
            scene = make_scene(kind, words.TRAIN, 640, 512, 0.8, seed)
            for ask in scene.asks:
                text = (
                    re.sub(r'"[^"]*"', "", ask.question)
                    + " "
                    + (ask.answer if ask.task in ("colour", "size", "describe", "absent") else "")
                )
                for word in set(re.findall(r"[A-Za-z]+", text)):
                    seen[word.lower()] += 1
    shown = {w for w, n in seen.items() if n >= 40 and w not in content}
    return [*dict.fromkeys(EXTRA), *sorted(shown - set(EXTRA))]


def build() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for word in question_words():
        for form in (word, "\u0120" + word, word.capitalize()):
            vocab.setdefault(form, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


TEMPLATE = """{%- macro content(value) -%}
{%- if value is string -%}{{ value }}
{%- else -%}
{%- for part in value -%}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + content(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

IMAGE = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}
LEAST, MOST = 224 * 224, 1344 * 1344  # pixels


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE.rstrip("\n"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "split_special_tokens": False,
        "processor_class": "Qwen3VLProcessor",
        "additional_special_tokens": list(SPECIAL[1:]),
    }
    size = {"shortest_edge": LEAST, "longest_edge": MOST}
    image = {
        **IMAGE,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": size,
    }
    video = {
        **IMAGE,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "fps": 2,
        "min_frames": 4,
        "max_frames": 64,
        "do_sample_frames": True,
        "size": {"shortest_edge": 4 * LEAST // 4, "longest_edge": 8 * MOST},
    }
    for name, data in (
        ("tokenizer_config", named),
        ("preprocessor_config", image),
        ("video_preprocessor_config", video),
    ):
        (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    print(tokenizer.get_vocab_size(), "entries")


if __name__ == "__main__":
    main()
