"""What level of detail saves and costs: requests per second, TTFT, stages of the relevance pass, ten
questions.

    python -m bench.lod [MODEL] [--part serve --part stages --part questions] [options of the engine]

serve      per image size: requests per second and TTFT at full detail and at shares of its tokens; every
image is new and the gate is off, so every request runs the relevance pass. `at most` and `floor` are the
bounds of the chip for as many visual tokens; `captured` is the share of steps run as CUDA graphs stages
milliseconds of each stage of the relevance pass for one image; of texture and maps together, captured and
not; of everything a new image costs questions  ten questions about one image, at
full detail over the prefix cache, and with zooms: one after the other, with stages, encodes and prefix hits;
then ten at once

Images are text-like noise on a plain ground, so that there is something to choose. With random weights
(`--load-format dummy`) the choice means nothing, but its cost does. Spent tokens are shown beside the budget:
a region that is not worth its tokens is not zoomed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.lod_asking import Level, LodBench, prepare, warm
from bench.lod_questions import questions
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, width_and_height, with_options
from saccade.kernels.cuda_graph import CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.llm import LLM
from saccade.lod import scorers as relevance
from saccade.lod.checkpoint_views import checkpoint_views
from saccade.lod.controller import choose
from saccade.lod.detail import plan_global_view
from saccade.lod.image_maps import ImageMapRunner
from saccade.lod.texture import texture
from saccade.lod.types import LodParams, RelevanceMaps, ScoredImage

ROUNDS = 20  # of a stage


def serve(
    bench: LodBench, sizes: Sequence[tuple[int, int]], levels: Sequence[Level], requests: int, repeat: int
) -> None:
    print(
        f"\n{'size':>11} {'detail':>6} {'budget':>6} {'spent':>6}"
        f" {'requests/s':>10} {'x full':>6} {'at most':>8} {'TTFT ms':>8} {'floor':>6} {'captured':>8}"
    )
    for size in sizes:
        full = bench.full_tokens(size)
        base: float | None = None
        for level in levels:
            warm(bench, size, level, full, requests)
            firsts = [1e3 * bench.ask([bench.image(size)], level, full, tokens=1)[0] for _ in range(repeat)]
            rates, spent = [], []
            before = bench.steps
            for _ in range(repeat):
                seconds, outputs = bench.ask([bench.image(size) for _ in range(requests)], level, full)
                rates.append(requests / seconds)
                spent += [one.usage.visual_tokens for one in outputs]
            steps, captured = (now - then for now, then in zip(bench.steps, before, strict=True))
            rate = statistics.median(rates)
            base = base or rate
            budget = full if level.share is None else int(full * level.share)
            most, floor = bench.ceiling(round(statistics.mean(spent)), requests)
            print(
                f"{size[0]:>5}x{size[1]:<5} {level.name:>6} {budget:6} {statistics.mean(spent):6.0f}"
                f" {rate:10.2f} {rate / base:6.2f} {most:8.1f} {statistics.median(firsts):8.1f} {floor:6.1f}"
                f" {captured / max(steps, 1):8.0%}",
                flush=True,
            )


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds, waiting for the device each time."""
    samples = []
    for number in range(ROUNDS + 3):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 3:
            samples.append(1e3 * (time.perf_counter() - began))
    return statistics.median(samples)


@torch.inference_mode()
def stages(bench: LodBench, size: tuple[int, int]) -> None:
    """Every stage by itself, then what is captured together."""
    info = bench.llm.engine.info
    device = torch.device(info.device)
    views = checkpoint_views(bench.front.checkpoint)
    text = bench.front.checkpoint.text_config
    heads, kv = int(text["num_attention_heads"]), int(text["num_key_value_heads"])
    dim = int(text.get("head_dim") or text["hidden_size"] // heads)
    image = bench.front.checkpoint.image
    if image is None:
        raise click.ClickException("the model takes no images")
    frame = image.token_grid(*size)
    asked = LodParams(budget=max(1, frame[0] * frame[1] // 4), gate=False)
    budget, grid = plan_global_view(frame, asked, views.rule)
    tokens = grid[0] * grid[1]
    pixels = torch.from_numpy(bench.image(size)).to(device)
    made = texture(pixels)
    queries = torch.randn(3, 1, heads, dim, device=device)
    keys = torch.randn(3, tokens, kv, dim, device=device)
    coupling: Callable[[], tuple[Tensor, Tensor]] = lambda: relevance.from_attention(queries, keys)  # noqa: E731
    if views.head is not None:
        asking = torch.randn(views.head.width, device=device)
        places = torch.randn(tokens, views.head.width, device=device)
        coupling = lambda: relevance.from_head(asking, places)  # noqa: E731
    share, strength = coupling()
    still = relevance.unpack_image_maps(relevance.image_maps(made, grid).cpu().numpy(), grid)
    look = RelevanceMaps(
        image_maps=still, participatory=share.cpu().numpy().reshape(grid), strength=float(strength)
    )
    scored = ScoredImage(look=look, size=size, frame=frame, grid=grid)
    recorder = CudaRecorder(device) if device.type == "cuda" else PlainRecorder()
    captured = ImageMapRunner(device, recorder, min_uses=1)
    parts: dict[str, Callable[[], object]] = {
        "texture": lambda: texture(pixels),
        "propositional": lambda: relevance.propositional(made, grid),
        "perspectival": lambda: relevance.perspectival(made, grid),
        "lost": lambda: relevance.lost(made, grid),
        "participatory": coupling,
        "  captured": capture(coupling, recorder),
        "choose (host)": lambda: choose([anew(scored)], budget, asked, views.rule),
        "  asked again": lambda: choose([scored], budget, asked, views.rule),
        "texture and its maps": lambda: relevance.image_maps(texture(pixels), grid),
        "  all of that captured": lambda: captured.maps(pixels, grid),
    }
    print(f"\na look at {size[0]}x{size[1]}, global view {grid[0]}x{grid[1]}, on {device}; milliseconds")
    took = {}
    for name, work in parts.items():
        took[name] = timed(work, device)
        print(f"  {name:28} {took[name]:8.3f}", flush=True)
    for title, of_them in (
        ("all, uncaptured", ("texture and its maps", "participatory", "choose (host)")),
        ("all, captured", ("  all of that captured", "  captured", "choose (host)")),
    ):
        print(f"  {title:28} {sum(took[name] for name in of_them):8.3f}", flush=True)


def anew(image: ScoredImage) -> ScoredImage:
    """As if nobody had asked about it before: nothing made of its still maps is kept."""
    return replace(image, look=replace(image.look, image_maps=replace(image.look.image_maps)))


def capture(coupling: Callable[[], tuple[Tensor, Tensor]], recorder: Recorder) -> Replay:
    """As a captured look has it, among the kernels of its step."""
    kept = [one.clone() for one in coupling()]

    def run() -> None:
        for one, found in zip(kept, coupling(), strict=True):
            one.copy_(found)

    return recorder.record(run)


PARTS = ("serve", "stages", "questions")


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="[default: all]")
@option(
    "--image-size", "sizes", type=width_and_height, multiple=True, metavar="WxH", help="[default: 1024x1024]"
)
@option("--share", "shares", type=float, multiple=True, default=(0.25, 0.12), help="of full detail's tokens")
@option("--requests", type=int, default=32, help="at once, of `serve`")
@option("--answer-tokens", "lengths", type=int, multiple=True, default=(16,), help="`questions`: of each")
@option("--repeat", type=int, default=3)
@option("--inputs-seed", type=int, default=0)
@with_options(ENGINE_OPTIONS)
def main(
    model: str,
    parts: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...],
    shares: tuple[float, ...],
    requests: int,
    lengths: tuple[int, ...],
    repeat: int,
    inputs_seed: int,
    **given: Any,
) -> None:
    config = engine_config(model, given)
    llm = LLM(model, progress=False, **config.options())
    bench = LodBench(llm, lengths[0], inputs_seed)
    levels = [Level(None), *(Level(share) for share in shares)]
    sizes = sizes or ((1024, 1024),)
    info = llm.engine.info
    print(f"{model} on {info.device}, {info.dtype}; answers of {lengths[0]} tokens where nothing is said")
    if bench.on_cuda:
        prepare(llm)
    chosen = parts or PARTS
    if "stages" in chosen:
        for size in sizes:
            stages(bench, size)
    if "questions" in chosen:
        for length in lengths:
            questions(bench, sizes, levels, length)
    if "serve" in chosen:
        serve(bench, sizes, levels, requests, repeat)
    llm.close()
    stats = llm.engine.stats()
    sys.exit(1 if stats.blocks_used or stats.running or stats.waiting else 0)


if __name__ == "__main__":
    main()
