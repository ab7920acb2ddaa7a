"""The requests of a soak test: text, images of every size, known ones again, and many malformed ones."""

import base64
import io
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

Behaviour = Literal["read", "slow", "leave before", "leave within", "killed", "half a body"]
MODEL = "soak"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZES = (40, 1100)  # of images, along a side, log-uniform
KNOWN = 12  # images that come again and again
TEXT = "what is the total amount of this picture and which colour has every small shape near the sign"

BEHAVIOURS: dict[Behaviour, float] = {
    "read": 0.70,
    "slow": 0.05,
    "leave before": 0.07,
    "leave within": 0.10,
    "killed": 0.05,
    "half a body": 0.03,
}
KINDS = {"text": 0.34, "completion": 0.06, "image": 0.24, "known": 0.16, "images": 0.06, "bad": 0.14}


@dataclass(frozen=True)
class Shot:
    kind: str
    path: str
    body: bytes
    behaviour: Behaviour
    stream: bool
    wrong: bool  # the server must refuse it


class Traffic:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._known = [self._image() for _ in range(KNOWN)]
        self._bad = [*BAD.items()]

    def next(self, *, kind: str | None = None, behaviour: Behaviour | None = None) -> Shot:
        kind = kind or self._draw(KINDS)
        behaviour = behaviour or self._draw(BEHAVIOURS)
        if kind == "bad":
            name, make = self._bad[int(self._rng.integers(len(self._bad)))]
            return Shot(f"bad: {name}", CHAT, make(), "read", False, wrong=True)
        fields = self._fields()
        if behaviour in ("slow", "leave within", "killed"):
            fields |= {"stream": True, "ignore_eos": True, "max_tokens": int(self._rng.integers(48, 160))}
        stream = bool(fields.get("stream"))
        if kind == "completion":
            prompts = [self._text() for _ in range(int(self._rng.integers(1, 4)))]
            body = {"model": MODEL, "prompt": prompts, **fields}
            return Shot(kind, COMPLETIONS, _json(body), behaviour, stream, wrong=False)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self._urls(kind)]
        content: Any = [*parts, {"type": "text", "text": self._text()}] if parts else self._text()
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return Shot(kind, CHAT, _json(body), behaviour, stream, wrong=False)

    def share(self) -> float:
        """Uniform in 0 .. 1: how far into an answer a client leaves."""
        return float(self._rng.random())

    def wait(self, rate: float) -> float:
        """Seconds to the next arrival of a Poisson process."""
        return float(self._rng.exponential(1 / rate))

    def _urls(self, kind: str) -> list[str]:
        if kind == "image":
            return [self._image()]
        if kind == "known":
            return [self._known[int(self._rng.integers(KNOWN))]]
        if kind == "images":
            return [self._image() for _ in range(int(self._rng.integers(2, 4)))]
        return []

    def _fields(self) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {"max_tokens": int(rng.integers(4, 64)), "stream": bool(rng.random() < 0.5)}
        if rng.random() < 0.5:
            fields |= {"temperature": float(rng.uniform(0.2, 1.5)), "top_p": float(rng.uniform(0.5, 1.0))}
        if rng.random() < 0.2:
            fields |= {"n": int(rng.integers(2, 5))}
        if rng.random() < 0.1:
            fields |= {"frequency_penalty": 0.5, "logit_bias": {"5": -3.0}}
        if rng.random() < 0.3:
            fields |= {"ignore_eos": True}
        return fields

    def _text(self) -> str:
        count = int(self._rng.geometric(0.03))
        return " ".join(self._rng.choice(TEXT.split(), min(count, 400)))

    def _image(self) -> str:
        low, high = np.log(SIZES)
        width, height = (int(side) for side in np.exp(self._rng.uniform(low, high, 2)))
        colours = self._rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(colours).resize((width, height), Image.Resampling.BILINEAR)
        png = self._rng.random() < 0.3
        return data_uri(image, "PNG" if png else "JPEG")

    def _draw(self, shares: dict[Any, float]) -> Any:
        names = list(shares)
        return names[int(self._rng.choice(len(names), p=list(shares.values())))]


def data_uri(image: Image.Image, format_: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format_)
    return raw_uri(buffer.getvalue(), f"image/{format_.lower()}")


def raw_uri(content: bytes, mime: str) -> str:
    return f"data:{mime};base64," + base64.b64encode(content).decode()


def bomb(side: int) -> bytes:
    """A small PNG that claims side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return len(content).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    rows = zlib.compress(b"\x00" * (side + 1) * 8, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _saying(text: Any, **more: Any) -> bytes:
    return _json({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more})


def _looking_at(url: str, **more: Any) -> bytes:
    return _saying(
        [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}], **more
    )


_TORN = b"\xff\xd8\xff\xe0" + bytes(range(200))  # starts like a JPEG
BAD: dict[str, Callable[[], bytes]] = {
    "not json": lambda: b"hello",
    "nothing": lambda: b"",
    "cut off": lambda: _saying("hello")[:-9],
    "an unknown field": lambda: _saying("hello", shiny=True),
    "another model": lambda: _saying("hello").replace(b'"soak"', b'"other"'),
    "a negative temperature": lambda: _saying("hello", temperature=-1),
    "too many choices": lambda: _saying("hello", n=1000),
    "too long a text": lambda: _saying("hello " * 20_000),
    "no messages": lambda: _json({"model": MODEL, "messages": []}),
    "junk base64": lambda: _looking_at("data:image/png;base64,@@@@"),
    "a torn jpeg": lambda: _looking_at(raw_uri(_TORN, "image/jpeg")),
    "text as png": lambda: _looking_at(raw_uri(b"hello", "image/png")),
    "a bomb": lambda: _looking_at(raw_uri(bomb(30_000), "image/png")),
    "a private address": lambda: _looking_at("http://127.0.0.1:1/a.png"),
    "a file": lambda: _looking_at("file:///etc/passwd"),
    "too large a body": lambda: _saying("x" * (9 << 20)),
    "no video": lambda: _saying(
        [{"type": "video_url", "video_url": {"url": raw_uri(bytes(4096), "video/mp4")}}]
    ),
}
