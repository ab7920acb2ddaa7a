"""An engine that answers as the prompt tells it to, behind the real input processor and server.

The checkpoint folder has a byte-per-token tokenizer, so that texts are easy to script and to count. What a
prompt says decides the answer; anything else is answered with `ANSWER`:

    say: TEXT           answers TEXT, one token a step, then the end token
    hang                one token, then nothing until cancelled
    never               not even one token
    wait for FILE       one token; the others when there is such a file
    fail / die / full   the engine breaks on this request / ends / has no room
    broken              the link raises something nobody foresaw
    forgotten / lost    a named picture is not known / is gone when its turn comes
    unseen              a picture could not be encoded
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from saccade.checkpoint import open_checkpoint
from saccade.config import MediaLimits
from saccade.engine.ipc import EngineInfo
from saccade.errors import EngineDied, ImageNotFound, Overloaded
from saccade.inputs.processor import InputProcessor
from saccade.metrics import NOT_QUANTIZED, EngineStats
from saccade.request import Delta, EngineTimes, FinishReason, Request, TokenLogprobs

ANSWER = "The eye jumps."
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END = 256 + SPECIAL.index("<|im_end|>")
IMAGE = 256 + SPECIAL.index("<|image_pad|>")
VOCAB = 300
CONTEXT = 2048

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""


# With tools, reasoning and images in tool messages, as the templates of Qwen have them.
AGENT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\nTools, called in <tool_call> tags:' + tools | tojson + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- parts(message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{- '<tool_call>' + function | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
"""


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _byte_of(letter: str) -> int:
    """The byte a byte-level letter stands for, so that a token's id is its byte."""
    text = decoders.ByteLevel().decode([letter])
    raw = text.encode()
    if text != "\ufffd":
        return raw[0]
    # Bytes above 0x7f are no text by themselves: printable ones are their own letter.
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    if ord(letter) in kept:
        return ord(letter)
    return [byte for byte in range(256) if byte not in kept][ord(letter) - 256]


def write_checkpoint(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    identity = {name: 256 + SPECIAL.index(token) for name, token in _MARKS.items()}
    _write(
        folder / "config.json",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {"max_position_embeddings": CONTEXT, "vocab_size": VOCAB},
            **identity,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": [END, 256], "temperature": 0.5, "top_k": 7})
    processing = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    area = {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}
    _write(
        folder / "preprocessor_config.json",
        {**processing, "size": area, "image_processor_type": "Qwen2VLImageProcessor"},
    )
    return folder


_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def make_processor(folder: Path, template: str = TEMPLATE) -> InputProcessor:
    return InputProcessor(
        open_checkpoint(str(write_checkpoint(folder, template))), CONTEXT, MediaLimits(allowed_domains=())
    )


def said(request: Request) -> str:
    """The last message (or the whole prompt) as text."""
    text = bytes(token for token in request.prompt if token < 256).decode(errors="replace")
    text = text.rsplit("user\n", 1)[-1]
    return text.removesuffix("<think>\n").removesuffix("\nassistant\n")


class FakeLink:
    """Implements `EngineInterface`. Every prompt token but the first 4 counts as cached when asked again."""

    def __init__(self) -> None:
        self.alive = True
        self.info = EngineInfo(
            "fake", CONTEXT, VOCAB, 16, 128, 16, "cpu", "float32", 1000, dict(NOT_QUANTIZED)
        )
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.dropped: set[bytes] = set()
        self.keeps = False  # features of pictures, to be named later
        self.open: set[str] = set()
        self._times: dict[str, EngineTimes] = {}
        self._kept: list[AsyncGenerator[Delta, None]] = []
        self.latest = EngineStats(blocks_free=128)
        self.pause = 0.0  # seconds between tokens

    async def start(self) -> None:
        self.alive = True

    async def stop(self) -> None:
        self.alive = False

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def image_tiers(self, content: bytes, *, delete: bool = False) -> dict[str, int]:
        """Whatever was asked about is kept, until it is dropped."""
        contents = {media.view.content for request in self.requests for media in request.media}
        known = content in contents - self.dropped
        if delete:
            self.dropped.add(content)
        return {"gpu": int(known), "host": 0, "disk": 0}

    def stats(self) -> EngineStats:
        return self.latest

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        deltas = self._generate(request)
        self._kept.append(deltas)  # so that closing is somebody's deed, not the garbage collector's
        return deltas

    async def _generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        if not self.alive:
            raise EngineDied("the engine has ended")
        self.requests.append(request)
        self.open.add(request.id)
        left = request.sampling.n
        try:
            async for delta in self._deltas(request):
                left -= delta.finish is not None
                yield delta
        finally:
            self.open.discard(request.id)
            if left:
                self.cancel(request.id)

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        text = said(request)
        if text == "full":
            raise Overloaded("the queue is full")
        if text == "forgotten":
            raise ImageNotFound("not kept")
        if text in ("lost", "unseen"):
            code = {"lost": "image_not_found", "unseen": "encoding_failed"}[text]
            yield Delta(request_id=request.id, finish="error", error="gone", code=code)
            return
        if text == "broken":
            raise RuntimeError("secret: /srv/models/x.py at 10.0.0.1")
        if text == "die":
            self.alive = False
            raise EngineDied("the engine has ended")
        if text == "never":
            await asyncio.Event().wait()
        answer = text.removeprefix("say: ") if text.startswith("say: ") else ANSWER
        tokens = [*answer.encode(), END]
        for place in range(request.sampling.max_tokens):
            await asyncio.sleep(self.pause)
            if place and text == "hang":
                await asyncio.Event().wait()
            while place == 1 and text.startswith("wait for ") and not Path(text[9:]).exists():
                await asyncio.sleep(0.01)
            if place and text == "fail":
                yield Delta(request_id=request.id, finish="error", error="RuntimeError in /srv/engine.py")
                return
            token = tokens[place] if place < len(tokens) else END
            finish: FinishReason | None = (
                "stop"
                if token in request.sampling.stop_token_ids
                else "length"
                if place + 1 == request.sampling.max_tokens
                else None
            )
            for index in range(request.sampling.n):
                yield self._delta(request, index, token, finish, first=place == 0)
            if finish:
                return

    def _delta(
        self, request: Request, index: int, token: int, finish: FinishReason | None, first: bool
    ) -> Delta:
        now = time.monotonic()
        top = request.sampling.logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if top is not None:
            others = tuple(((token + step) % 256, -0.5 - step) for step in range(top))
            logprobs = (TokenLogprobs(-0.5, others),)
        return Delta(
            request_id=request.id,
            index=index,
            tokens=(token,),
            logprobs=logprobs,
            finish=finish,
            cached_tokens=len(request.prompt) - 4 if first else 0,
            kept=tuple(media.placeholder for media in request.media) if first and self.keeps else (),
            times=self._times.setdefault(request.id, EngineTimes(now, now, now)) if first or finish else None,
        )
