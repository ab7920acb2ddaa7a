"""A question about a new image, another about the same one, and one after a restart, stage by stage.

    python -m bench.stages [MODEL] [--images 5] [--image-size 1024x1024] [options of the engine]

A server with an encoder cache on disk is asked over HTTP, stopped and started again. Stages are the server's
own (`Server-Timing`), medians over the images; `round trip` is the client's time. A known image is first sent
again, which saves encoding and prefill of the cached prefix, then named by its hash, which also saves upload
and decoding. It prints the encoded views of each round, and fails unless each image is encoded once, in the
first."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import httpx

from bench.soak.watch import metrics
from saccade.checkpoint import open_checkpoint
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, width_and_height, with_options
from saccade.config import GIB, EngineConfig
from saccade.inputs.tokenizer import Tokenizer
from saccade.metrics import STAGES
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.server import SERVED_NAME, serving
from saccade.tools.report import median

ROUNDS = ("new image", "sent again", "named", "restart, named", "restart, sent")
QUESTION_TOKENS = 32
ENCODES = "saccade_vision_encodes_total"


def given(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def named(name: str) -> dict[str, Any]:
    return {"type": "image_ref", "image_ref": {"hash": name}}


def body(image: dict[str, Any], text: str, tokens: int) -> dict[str, Any]:
    content = [image, {"type": "text", "text": text}]
    return {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def stages(header: str) -> dict[str, float]:
    """Milliseconds by stage, from a Server-Timing header."""
    parts = (part.partition(";dur=") for part in header.split(", "))
    return {name: float(value) for name, _, value in parts}


async def ask(url: str, asked: Sequence[dict[str, Any]]) -> tuple[list[dict[str, float]], list[str]]:
    """One after the other; milliseconds by stage, and of the round trip; and the hash of each image."""
    timings, hashes = [], []
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        for one in asked:
            began = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=one)
            spent = (time.perf_counter() - began) * 1e3
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
            timings.append({**stages(answer.headers["server-timing"]), "round trip": spent})
            hashes.append(answer.json()["usage"]["images"][0]["hash"])
    return timings, hashes


def round_of(url: str, asked: Sequence[dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Medians by stage, and how many views the tower computed meanwhile."""
    before = metrics(url)[ENCODES]
    timings, _ = asyncio.run(ask(url, asked))
    names = [name for name in (*STAGES, "round trip") if any(name in one for one in timings)]
    middle = {name: median([one.get(name, 0.0) for one in timings]) for name in names}
    return middle, int(metrics(url)[ENCODES] - before)


def measure(
    config: EngineConfig, images: int, size: tuple[int, int], tokens: int
) -> list[tuple[dict[str, float], int]]:
    checkpoint = open_checkpoint(config.model)
    inputs = RandomInputs(checkpoint, Tokenizer.load(checkpoint), 0)
    seen = [inputs.data_uri(size) for _ in range(images)]

    def questions(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [body(part, inputs.words(QUESTION_TOKENS), tokens) for part in parts]

    warm, sent = [given(inputs.data_uri(size)) for _ in range(2)], [given(one) for one in seen]
    rounds = []
    with serving(config) as url:
        asyncio.run(ask(url, questions(warm)))
        rounds += [round_of(url, questions(sent)), round_of(url, questions(sent))]
        names = [named(name) for name in asyncio.run(ask(url, questions(sent)))[1]]
        rounds.append(round_of(url, questions(names)))
    for again in (names, sent):
        with serving(config) as url:
            asyncio.run(ask(url, questions(warm)))
            rounds.append(round_of(url, questions(again)))
    return rounds


def show(rounds: Sequence[tuple[dict[str, float], int]], what: str) -> None:
    print(f"{what}; median ms by stage")
    print(f"{'stage':14}" + "".join(f"{name:>18}" for name in ROUNDS))
    for name in (*STAGES, "round trip"):
        if any(name in middle for middle, _ in rounds):
            print(f"{name:14}" + "".join(f"{middle.get(name, 0.0):18.2f}" for middle, _ in rounds))
    print(f"{'views encoded':14}" + "".join(f"{encodes:18}" for _, encodes in rounds))


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--images", type=int, default=5)
@option("--image-size", type=width_and_height, default="1024x1024", metavar="WxH")
@option("--answer-tokens", type=int, default=16)
@with_options(ENGINE_OPTIONS)
def main(model: str, images: int, image_size: tuple[int, int], answer_tokens: int, **given: Any) -> None:
    config = engine_config(model, given)
    with tempfile.TemporaryDirectory(prefix="saccade-stages-") as folder:
        if not config.vision_cache.disk:
            cache = replace(config.vision_cache, disk=GIB, dir=folder)
            config = replace(config, vision_cache=cache)
        rounds = measure(config, images, image_size, answer_tokens)
    size = "{} x {}".format(*image_size)
    show(rounds, f"{model}, {images} images of {size}, {answer_tokens} tokens out")
    sys.exit(0 if rounds[0][1] >= images and not sum(encodes for _, encodes in rounds[1:]) else 1)


if __name__ == "__main__":
    main()
