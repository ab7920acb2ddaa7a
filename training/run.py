"""One training run of at most some minutes; several in a row make the schedule. Resumes from its own state.

    python -m training.run --seconds 540 --upto 0.5      first run: progress 0 to 0.5
    python -m training.run --seconds 540 --upto 1.0      resumes from training/.state/last.pt, 0.5 to 1
    python -m training.run --device cpu --seconds 20 --toy      everything, tiny, on a CPU

Progress runs with the clock: `--upto` is reached when the seconds are over. Learning rate and curriculum
depend on it."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

from saccade.tools.evaluation.renderer import SHAPES

from . import ROOT
from .data import Spec
from .export import HEADS
from .feed import Feed
from .model import Heads, Model, compile_parts, initialise
from .optim import Optimiser
from .quality import quick, quick_batch, quick_jobs
from .raster import Painter
from .scenes.scene import COLOUR_NAMES
from .shape import Shape
from .sketch import plan_views
from .steps import losses, to_batch

STATE = ROOT / "training/.state/last.pt"


def plan_batch(settings: dict[str, Any], progress: float, rng: Random, toy: bool) -> Spec:
    """A batch for this moment of the schedule."""
    stages = settings["stages"]
    index = next(i for i, s in enumerate(stages) if progress <= s["until"] or i == len(stages) - 1)
    if index and rng.random() < 0.1:
        index -= 1  # a little of what came before
    stage = stages[index]
    begin = stages[index - 1]["until"] if index else 0.0
    part = min(1.0, max(0.0, (progress - begin) / (stage["until"] - begin)))
    level = stage["level"][0] + (stage["level"][1] - stage["level"][0]) * part
    width, height, _ = rng.choices(stage["sides"], [s[2] for s in stage["sides"]])[0]
    text = stage["text"]
    if rng.random() < stage.get("views", 0.0):
        kinds = stage.get("view_kinds", stage["kinds"])
        return plan_views(settings["patches"], level, kinds, rng, toy)
    patches = width * height // 256
    batch = 4 if toy else max(8, min(640, settings["patches"] // patches) // 8 * 8)
    return Spec(width, height, batch, text, level, stage["kinds"])


class Clock:
    """Progress as a function of the time spent training (compilation of the first steps is not counted)."""

    def __init__(self, begin: float, end: float, seconds: float) -> None:
        self.begin, self.end, self.seconds = begin, end, seconds
        self.started = time.monotonic()

    def progress(self) -> float:
        spent = (time.monotonic() - self.started) / self.seconds
        return self.begin + (self.end - self.begin) * min(1.0, spent)


def rate_share(settings: dict[str, Any], progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / settings["warmup_steps"])
    start = settings["decay_from"]
    return float(warm * (1.0 if progress < start else max(0.0, (1.0 - progress) / (1.0 - start))))


def save(path: Path, model: Model, heads: Heads, optimiser: Optimiser | None, about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = torch.float32 if optimiser else torch.bfloat16
    data: dict[str, Any] = {
        "model": {k: v.to(kind) for k, v in model.state_dict().items()},
        "heads": {k: v.to(kind) for k, v in heads.state_dict().items()},
        **about,
    }
    if optimiser:
        data["optimiser"] = optimiser.state()
    torch.save(data, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Model and heads from a file of `save`, or from a checkpoint folder with training/heads.safetensors."""
    if path.is_file():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return saved["model"], saved["heads"]
    return load_file(str(path / "model.safetensors")), load_file(str(HEADS))


def bring_back(out: Path, model: Model, heads: Heads, about: dict[str, Any], limit: int = 15 << 20) -> None:
    """Weights in bf16 as pieces small enough to travel: weights.pt.0, .1, ... (training.join puts them
    together)."""
    whole = ROOT / "training/.state/whole.pt"
    save(whole, model, heads, None, about)
    data = whole.read_bytes()
    for i in range(0, len(data), limit):
        part = out / f"weights.pt.{i // limit}"
        part.with_suffix(".tmp").write_bytes(data[i : i + limit])
        part.with_suffix(".tmp").rename(part)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument(
        "--within", type=float, help="seconds from the start on: fewer of training if need be"
    )
    parser.add_argument("--upto", type=float, default=1.0)
    parser.add_argument("--fresh", action="store_true", help="ignore a state left by an earlier run")
    parser.add_argument("--weights", type=Path, help="begin from this file or folder, optimiser new")
    parser.add_argument(
        "--begin", type=float, default=0.0, help="progress to begin at when there is no state"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "training/.state/out")))
    parser.add_argument("--settings", type=Path, default=ROOT / "training/settings.json")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-state", action="store_true", help="leave no state behind (trials)")
    return parser.parse_args()


class Trainer:
    """Owns model, optimiser and clock of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = json.loads(options.settings.read_text())
        if options.rate:
            self.settings["rate"] = options.rate
        self.device = torch.device(options.device)
        self.rng = Random(time.time_ns())
        self.clock = Clock(0.0, options.upto, options.seconds)
        workers = 2 if options.toy else max(2, (os.cpu_count() or 4) - 2)
        self.feed = Feed(self.next_spec, workers, 4 if options.toy else 40)
        pool = mp.get_context("fork").Pool(2)  # now: later CUDA is up, and at the end there is no time
        self.exam = pool.map_async(quick_batch, quick_jobs(options.toy), chunksize=1)
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.shape = Shape()
        self.model = Model(self.shape)
        self.heads = Heads(self.shape, len(SHAPES), len(COLOUR_NAMES))
        initialise(self.model, self.shape.depth)
        initialise(self.heads, self.shape.depth)
        self.model.to(self.device)
        self.heads.to(self.device)
        self.optimiser = Optimiser(self.model, self.heads, self.settings["rate"], self.settings["adam_rate"])
        self.step, begin = 0, options.begin
        if options.weights:
            model, kept = load_weights(options.weights)
            self.model.load_state_dict(model)
            self.heads.load_state_dict(kept)
        elif STATE.exists() and not options.fresh:
            saved = torch.load(STATE, map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.heads.load_state_dict(saved["heads"])
            self.optimiser.load(saved["optimiser"])
            self.step, begin = saved["step"], saved["progress"]
        self.painter = Painter(self.device)
        if self.device.type == "cuda" and not options.no_compile:
            compile_parts()
        self.clock = Clock(begin, options.upto, options.seconds)
        self.log = (options.out / "log.jsonl").open("a")
        self.pictures = 0
        self.waited = 0.0  # seconds in which no batch was ready, since the last line of the log
        self.dense_tokens = 512 if options.toy else self.settings.get("dense_tokens", 16384)

    def next_spec(self, number: int) -> tuple[Spec, int]:
        return plan_batch(
            self.settings, self.clock.progress(), self.rng, self.options.toy
        ), self.rng.getrandbits(60)

    def dense(self) -> float:
        stages = self.settings["stages"]
        return float(
            next((s["dense"] for s in stages if self.clock.progress() <= s["until"]), stages[-1]["dense"])
        )

    def train_step(self) -> Any:
        asked = time.monotonic()
        spec, data = self.feed.next()
        self.waited += time.monotonic() - asked
        with torch.no_grad():
            batch = to_batch(spec, data, self.painter)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = losses(spec, data, batch, self.model, self.heads, self.dense(), self.dense_tokens)
        loss.total.backward()
        for p in (*self.model.parameters(), *self.heads.parameters()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.optimiser.step(rate_share(self.settings, self.clock.progress(), self.step))
        self.step += 1
        self.pictures += spec.batch
        return spec, torch.stack([v.detach().float() for v in loss])

    def about(self) -> dict[str, Any]:
        return {"step": self.step, "progress": self.clock.progress()}

    def record(self, rows: list[Any], since: float) -> None:
        """One line of the log: means over the steps since the last one, plain and views apart."""
        plain = [r for s, r in rows if not s.views]
        seen = [r for s, r in rows if s.views]
        names = ("total", "answer", "characters", "things", "relevance", "right", "read")
        line: dict[str, Any] = {
            **self.about(),
            "pictures": self.pictures,
            "steps_per_s": len(rows) / (time.monotonic() - since),
            "waited_share": round(self.waited / (time.monotonic() - since), 3),
            "rate": rate_share(self.settings, self.clock.progress(), self.step),
        }
        if plain:
            line.update(
                {
                    k: round(float(v), 4)
                    for k, v in zip(names, torch.stack(plain).mean(0).tolist(), strict=True)
                }
            )
        if seen:
            mean = torch.stack(seen).mean(0)
            line.update(
                views_answer=round(float(mean[1]), 4),
                views_right=round(float(mean[5]), 4),
                views_relevance=round(float(mean[4]), 4),
                views_characters=round(float(mean[2]), 4),
                views_read=round(float(mean[6]), 4),
            )
        self.waited = 0.0
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        print(json.dumps(line), flush=True)

    def loop(self) -> None:
        every = 2 if self.options.toy else 100
        rows: list[Any] = []
        since = saved = time.monotonic()
        while self.clock.progress() < self.options.upto:
            rows.append(self.train_step())
            if len(rows) == every:
                self.record(rows, since)
                rows, since = [], time.monotonic()
                if since - saved > 120:
                    bring_back(self.options.out, self.model, self.heads, self.about())
                    saved = time.monotonic()

    def finish(self) -> None:
        bring_back(self.options.out, self.model, self.heads, self.about())
        if not self.options.no_state:
            save(STATE, self.model, self.heads, self.optimiser, self.about())
        table = quick(self.model, self.painter, self.device, self.exam.get())
        self.log.write(json.dumps({"quick": table}) + "\n")
        self.log.flush()
        print(json.dumps(table))
        self.feed.close()


def main() -> None:
    started, options = time.monotonic(), arguments()
    # Batches of many shapes: without it the allocator keeps a pool for each and stops to free them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        torch.set_num_threads(2)
    trainer = Trainer(options)
    trainer.feed.begin(trainer.device)
    if trainer.device.type == "cuda":
        for _ in range(3):
            trainer.train_step()  # compiles; not counted
        torch.cuda.synchronize()
        trainer.clock.started = time.monotonic()
    if options.within:
        spent = time.monotonic() - started
        trainer.clock.seconds = max(1.0, min(options.seconds, options.within - spent))
    trainer.loop()
    trainer.finish()


if __name__ == "__main__":
    main()
