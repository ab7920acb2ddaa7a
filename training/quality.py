"""Accuracy by task, measured with the training model.

`quick`: fresh scenes of the evaluation split at a few sizes, drawn on the device. `python -m training.quality
weights.pt`: the fixed evaluation set, images drawn by the CPU renderer and resized as the processor does."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.tools.evaluation.question_set import TASKS, Example, correct, example

from .data import Arrays, Spec, build, grid_places
from .model import Batch, Model
from .raster import Painter
from .scenes.words import EVAL
from .shape import Shape
from .sketch import plan_views
from .steps import branch_right, to_batch
from .tokens import IM_END, MIDDLE, START, VISION_END, decode, encode

PAPER = {"form": 1.0, "receipt": 1.0, "table": 1.0, "bars": 1.0, "lines": 1.0, "pie": 1.0}
QUICK = (
    Spec(384, 384, 128, 256, 0.9, {"objects": 1.0, "signs": 2.0}),
    Spec(512, 448, 128, 256, 0.9, PAPER),
    Spec(640, 640, 64, 256, 0.9, {**PAPER, "small_print": 3.0}),
    Spec(896, 896, 48, 256, 0.9, {"needle": 2.0, "small_print": 1.0}),
)
SEEN = {**PAPER, "signs": 2.0, "objects": 2.0, "needle": 1.0, "small_print": 1.0}
Job = tuple[str, Spec, int]  # a table's name, a batch, its seed


def quick_jobs(small: bool = False) -> list[Job]:
    """What `quick` asks: whole images, and views at a quarter of the tokens."""
    rng = Random(900)
    views = [plan_views(32 << 10, 0.9, SEEN, rng, small, {0.25: 1.0}) for _ in range(2 if small else 12)]
    jobs: list[Job] = [("plain", spec, 7000 + seed) for spec in QUICK for seed in range(1 if small else 4)]
    jobs += [("views", spec, 7000 + seed) for spec in views for seed in range(1 if small else 2)]
    return [(name, replace(spec, batch=2), seed) for name, spec, seed in jobs] if small else jobs


def quick_batch(job: Job) -> tuple[str, Spec, Arrays]:
    name, spec, seed = job
    return name, spec, build(spec, seed, EVAL)


@torch.no_grad()
def quick(
    model: Model, painter: Painter, device: torch.device, batches: Iterable[tuple[str, Spec, Arrays]]
) -> dict[str, Any]:
    tables: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for name, spec, arrays in batches:
        data = {k: torch.from_numpy(v).to(device) for k, v in arrays.items()}
        batch = to_batch(spec, data, painter)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right = branch_right(data, batch, model)
        for task, ok in zip(data["task"].flatten().tolist(), right.flatten().tolist(), strict=True):
            if task >= 0:
                hits = tables[name][TASKS[task]]
                hits[0] += int(ok)
                hits[1] += 1
    return {
        name: {k: [round(a / n, 3), n] for k, (a, n) in sorted(table.items())}
        for name, table in tables.items()
    }


def resized(image: np.ndarray, least: int = 224 * 224, most: int = 1344 * 1344) -> np.ndarray:
    """The processor's resize: sides rounded to 32, pixels between least and most, bicubic."""
    height, width = image.shape[:2]
    h, w = round(height / 32) * 32, round(width / 32) * 32
    if h * w > most:
        beta = math.sqrt(height * width / most)
        h, w = max(32, math.floor(height / beta / 32) * 32), max(32, math.floor(width / beta / 32) * 32)
    elif h * w < least:
        beta = math.sqrt(least / (height * width))
        h, w = math.ceil(height * beta / 32) * 32, math.ceil(width * beta / 32) * 32
    if (h, w) == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.BICUBIC))


def _draw(job: tuple[str, int, int]) -> Example:
    task, index, most = job
    asked = example(task, index)
    image = asked.image
    if most:  # shrink to at most this many visual tokens
        image = resized(image, least=32 * 32, most=most * 1024)
    return Example(
        asked.task,
        resized(image) if not most else image,
        asked.question,
        asked.answer,
        asked.accepted,
        asked.box,
        asked.kind,
        asked.index,
    )


def drawn(count: int, workers: int, most: int = 0, tasks: tuple[str, ...] = TASKS) -> Iterator[Example]:
    jobs = [(task, index, most) for task in tasks for index in range(count)]
    with mp.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(_draw, jobs, chunksize=4)


@torch.no_grad()
def answer(model: Model, asked: Example, device: torch.device, steps: int = 48) -> str:
    """Greedy answer. The reference is fed first: where it is the greedy answer itself, one pass is enough."""
    image = torch.from_numpy(np.array(asked.image)).to(device)[None]
    rows, columns = asked.image.shape[0] // 32, asked.image.shape[1] // 32
    grid = grid_places(0, 0, columns * 32, rows * 32, rows, columns)
    place = np.concatenate(
        [
            np.tile(np.arange(4, dtype=np.float32), (3, 1)),
            np.concatenate([np.zeros((1, rows * columns), np.float32), grid]) + 4,
        ],
        1,
    )
    head = [VISION_END, *encode(asked.question), *MIDDLE]
    guess = [*encode(asked.answer), IM_END]
    for _ in range(steps):
        ids = head + guess
        positions = torch.arange(len(ids), device=device).float() + 4 + max(rows, columns)
        batch = Batch(
            image,
            None,
            torch.tensor(START, device=device),
            torch.from_numpy(place).to(device),
            torch.tensor([ids], device=device),
            None,
            positions.expand(3, 1, -1),
            torch.zeros(1, len(ids), dtype=torch.long, device=device),
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = model.logits(model(batch).hidden)[0, len(head) - 1 : -1].argmax(-1).tolist()
        wrong = next((i for i, (a, b) in enumerate(zip(best, guess, strict=True)) if a != b), None)
        if wrong is None:
            return decode(guess[: guess.index(IM_END)] if IM_END in guess else guess)
        guess = [*guess[:wrong], best[wrong]]
        if best[wrong] != IM_END:
            guess.append(IM_END)
    return decode(guess)


def measure(model: Model, device: torch.device, count: int, workers: int, most: int = 0) -> dict[str, Any]:
    """Accuracy by task on the fixed set, and examples of what went wrong."""
    hits: dict[str, int] = defaultdict(int)
    wrong: list[list[str]] = []
    for asked in drawn(count, workers, most):
        text = answer(model, asked, device)
        good = correct(asked, text)
        hits[asked.task] += good
        if asked.index == count - 1:
            print(f"{asked.task:12s} {hits[asked.task] / count:.3f}", flush=True)
        if not good:
            wrong.append([asked.task, str(asked.index), asked.question, asked.answer, text])
    table = {task: round(hits[task] / count, 4) for task in TASKS}
    return {
        "overall": round(sum(hits.values()) / count / len(TASKS), 4),
        "tasks": table,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[0], help="most visual tokens per image; 0 is native"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "quality.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(2)
    model = Model(Shape())
    model.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True)["model"])
    model.to(device).eval()
    results = {}
    for most in options.tokens:
        results[str(most)] = found = measure(
            model, device, options.count, max(2, (os.cpu_count() or 4) - 2), most
        )
        print(most or "native", found["overall"], json.dumps(found["tasks"]), flush=True)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
