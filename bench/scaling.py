"""How times grow: a decode step with the batch and the context, the first token with the image size.

    python -m bench.scaling [MODEL] [--parts batch,context,images] [--plots FOLDER] [options of the engine]

Every figure is shown with its floor, the lower bound at the peak rates of the device
(tools/profiler/floors.py). Steps are timed one by one while all sequences decode, after their prefill;
prompts are distinct, so nothing is shared. Points that do not fit the engine are left out and named. --plots
writes scaling.json and the plots; `--redraw` draws them again without an engine."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from bench.plot import LinePlot, Series, load_plotter
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, with_options
from saccade.engine.cost_prior import read_model_size
from saccade.engine.memory import DTYPES
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.workloads import greedy
from saccade.tools.environment import device_name
from saccade.tools.profiler.floors import Floors, floors
from saccade.tools.report import median

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SIDES = (224, 448, 640, 896, 1024, 1408, 2048, 2896)  # of square images
CONTEXT = 512  # of the batches
TEXT_TOKENS = 64  # beside an image
WARM_STEPS = 4  # the first ones may capture or tune
STEP_TOKENS = 2048  # a step computes at least so many of the prompts, unless the user has it do less

STORED = "scaling.json"


@dataclass(frozen=True)
class Point:
    at: int
    milliseconds: float
    floor: float


def times(value: str) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split(","))


class ScalingBench:
    def __init__(self, llm: LLM, steps: int, repeat: int, step_tokens: int | None = None) -> None:
        self.llm = llm
        self._step_tokens = step_tokens or STEP_TOKENS
        info = llm.engine.info
        checkpoint = llm.processor.checkpoint
        self._inputs = RandomInputs(checkpoint, llm.processor.tokenizer, 0)
        self._steps = steps
        self._repeat = repeat
        dtype = DTYPES[info.dtype]
        network = read_model_size(checkpoint.config, dtype.itemsize)
        self.floors: Floors = floors(network, torch.device(info.device), dtype)
        self._names = iter(range(1 << 30))

    # A decode step

    def why_not(self, rows: int, context: int) -> str | None:
        info = self.llm.engine.info
        length = context + self._answer(rows, context)
        if length > info.max_model_len:
            return f"{length} tokens are more than the {info.max_model_len} a sequence may have"
        if rows > info.max_num_seqs:
            return f"{rows} rows are more than --max-num-seqs {info.max_num_seqs}"
        blocks = rows * -(-length // info.block_size)
        return (
            f"{blocks} blocks are more than the {info.num_blocks} there are"
            if blocks > info.num_blocks
            else None
        )

    def _answer(self, rows: int, context: int) -> int:
        """Tokens that keep the first sequence decoding until the last one's prefill is done, and through the
        timing."""
        return WARM_STEPS + self._steps + 2 + 2 * -(-rows * context // self._step_tokens)

    def step(self, rows: int, context: int) -> Point:
        """The median step while `rows` sequences of about `context` tokens decode."""
        engine, front = self.llm.engine, self.llm.processor
        params = greedy(self._answer(rows, context))
        names = []
        for _ in range(rows):
            names.append(f"scaling-{next(self._names)}")
            engine.submit(front.prepare_prompt(self._inputs.text(context), params, names[-1], trusted=True))
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {delta.request_id for delta in engine.step()}
        samples = []
        for number in range(WARM_STEPS + self._steps - 1):
            start = time.perf_counter()
            outputs = len(engine.step())
            if number >= WARM_STEPS and outputs == rows:
                samples.append((time.perf_counter() - start) * 1e3)
        engine.cancel(names)
        while not engine.idle:
            engine.step()
        if not samples:
            raise RuntimeError(f"{rows} rows at {context} tokens never decoded together")
        middle = context + WARM_STEPS + self._steps // 2
        return Point(rows, median(samples), self.floors.decode(rows, middle))

    # A first token

    def image(self, side: int) -> Point:
        """The first token of a question about a new image of side x side, the median of a few."""
        processing = self.llm.processor.checkpoint.image
        if processing is None:
            raise RuntimeError("the model takes no images")
        samples = []
        for _ in range(self._repeat + 1):  # the first warms up
            question: dict[str, Any] = {
                "prompt_token_ids": self._inputs.about_image(TEXT_TOKENS),
                "images": [self._inputs.image((side, side))],
            }
            start = time.perf_counter()
            self.llm.generate([question], greedy(1), progress=False)
            samples.append((time.perf_counter() - start) * 1e3)
        height, width = processing.grid(side, side)
        patches = height * width
        floor = self.floors.encode(patches) + self.floors.prefill(
            patches // processing.merge_size**2 + TEXT_TOKENS + 2
        )
        return Point(side, median(samples[1:]), floor)

    def image_fits(self, side: int) -> bool:
        processing = self.llm.processor.checkpoint.image
        if processing is None:
            return False
        height, width = processing.grid(side, side)
        visual = height * width // processing.merge_size**2
        return visual + TEXT_TOKENS + 8 <= self.llm.engine.info.max_model_len


def measure(bench: ScalingBench, part: str, values: Sequence[int]) -> list[Point]:
    points = []
    for value in values:
        if part == "images":
            if not bench.image_fits(value):
                print(f"left out: an image of {value} x {value} does not fit the context", flush=True)
                continue
            points.append(bench.image(value))
            continue
        rows, context = (value, CONTEXT) if part == "batch" else (1, value)
        if reason := bench.why_not(rows, context):
            print(f"left out: {part} {value}: {reason}", flush=True)
            continue
        point = bench.step(rows, context)
        points.append(Point(value, point.milliseconds, point.floor))
    return points


TITLES = {
    "batch": ("A decode step over the batch", f"sequences, about {CONTEXT} tokens each", "step"),
    "context": ("A decode step over the context", "tokens of one sequence", "step"),
    "images": ("The first token over the image", "side of a square image, pixels", "first token"),
}


def show(part: str, points: Sequence[Point], where: str) -> None:
    title, axis, what = TITLES[part]
    print(f"\n{title} ({where})\n{axis:>36} {what + ', ms':>16} {'floor, ms':>10} {'of the floor':>13}")
    for point in points:
        share = point.floor / point.milliseconds
        print(f"{point.at:36,} {point.milliseconds:16.2f} {point.floor:10.2f} {share:12.0%}")


def plot(part: str, points: Sequence[Point], where: str) -> LinePlot:
    title, axis, what = TITLES[part]
    measured = Series(what, tuple((point.at, point.milliseconds) for point in points))
    floor = Series("floor", tuple((point.at, point.floor) for point in points), dashed=True)
    return LinePlot(title, where, axis, "ms", (measured, floor))


def store(found: dict[str, list[Point]], where: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STORED
    before = json.loads(path.read_text()) if path.exists() else {}
    parts = before["parts"] if before.get("where") == where else {}  # of a run of other parts
    parts |= {part: [astuple(point) for point in points] for part, points in found.items() if points}
    path.write_text(json.dumps({"where": where, "parts": parts}, indent=1) + "\n")


def draw(folder: Path) -> None:
    """Draws the plots of a stored run; needs matplotlib."""
    document = json.loads((folder / STORED).read_text())
    plotter = load_plotter()
    for part, points in document["parts"].items():
        drawn = plot(part, [Point(*point) for point in points], document["where"])
        plotter.save_svg(drawn, folder / f"{part}.svg")


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--parts", default="batch,context,images")
@option("--batches", type=times, default=",".join(map(str, BATCHES)))
@option("--contexts", type=times, default=",".join(map(str, CONTEXTS)))
@option("--sides", type=times, default=",".join(map(str, SIDES)))
@option("--steps", type=int, default=32, help="timed steps a point")
@option("--repeat", type=int, default=3, help="timed images a point")
@option("--plots", type=click.Path(file_okay=False, path_type=Path), help="folder for scaling.json and SVGs")
@option("--redraw", is_flag=True, help="draw the plots of FOLDER/scaling.json")
@with_options(ENGINE_OPTIONS)
def main(
    model: str,
    parts: str,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    sides: tuple[int, ...],
    steps: int,
    repeat: int,
    plots: Path | None,
    redraw: bool,
    **given: Any,
) -> None:
    if redraw:
        draw(plots or Path("docs/scaling"))
        return
    config = engine_config(model, given)
    llm = LLM(model, progress=False, **config.options())
    info = llm.engine.info
    bench = ScalingBench(llm, steps, repeat, config.max_num_batched_tokens)
    chip = bench.floors.chip
    where = f"{info.model}, {info.dtype}, {device_name(info.device)}"
    print(
        f"{where}; ceilings {chip.name}: {chip.bandwidth / 1e9:,.0f} GB/s, {chip.matrix / 1e12:,.2f} TFLOP/s",
        flush=True,
    )
    found: dict[str, list[Point]] = {}
    values = {"batch": batches, "context": contexts, "images": sides}
    for part in parts.split(","):
        if part not in values:
            sys.exit(f"there is no part {part!r}; choose from {', '.join(values)}")
        found[part] = measure(bench, part, values[part])
    for part, points in found.items():
        show(part, points, where)
    llm.close()
    if plots is not None:
        store(found, where, plots)
        try:
            draw(plots)
        except ConfigError as error:
            print(f"{error.message}; then use --redraw")


if __name__ == "__main__":
    main()
