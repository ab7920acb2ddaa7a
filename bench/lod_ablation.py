"""What each stage of level of detail is worth: balanced without one of them, and the texture's maps without
some of its channels.

    python -m bench.lod_ablation [MODEL] --limit 3 --share 0.25 --json docs/quality/lod_ablation.json

The other options are those of `saccade eval-lod`. `python -m bench.draw_quality` makes a page of the JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from saccade.checkpoint import open_checkpoint
from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, with_options
from saccade.config import EngineConfig
from saccade.inputs.image_processor import ImageProcessor
from saccade.lod.detail import shrink
from saccade.lod.scorers import lost, perspectival, propositional
from saccade.lod.texture import CHANNELS, texture
from saccade.lod.types import Grid, LodParams
from saccade.tools.evaluation.command import check_model
from saccade.tools.evaluation.lod import LodReport, as_json, compare_methods, print_lod_report
from saccade.tools.evaluation.lod_methods import BALANCED, EVERYWHERE, FULL, Trial, TrialFactory
from saccade.tools.evaluation.question_set import SEED, Example, chosen_tasks, example, sample_keys
from saccade.tools.options import LodEvalOptions
from saccade.tools.report import output_console, table, write_json

# Balanced without one of its stages.
ABLATIONS: dict[str, dict[str, object]] = {
    BALANCED: {},
    "without propositional": {"scorers": ("perspectival", "participatory")},
    "without perspectival": {"scorers": ("propositional", "participatory")},
    "without participatory": {"scorers": ("propositional", "perspectival")},
    "without balance": {"balance": False},
    "without gate": {"gate": False},
}
ABOUT_CHANNELS = "Area under the ROC curve: evidence against the rest, over a global view's tokens"
LOOK = 64  # tokens of the global view that the maps are made for
CHANNEL_GROUPS: dict[str, tuple[str, ...]] = {
    "all": (),
    "without red, green, blue": ("red", "green", "blue"),
    "without L*, a*": ("lightness", "green_red"),
    "without Sobel": ("edge_x", "edge_y", "edge"),
    "without place": ("y", "x", "eccentricity"),
    "without entropy": ("entropy",),
    "without text": ("text",),
}
MAPS = {"propositional": propositional, "perspectival": perspectival, "lost": lost}


@dataclass(frozen=True)
class ChannelScore:
    """How well one map finds the evidence without a group of channels: mean area under the ROC curve."""

    group: str
    map: str
    area: float
    examples: int


class ChannelAblation:
    """For examples whose evidence has a location: scores the maps that need no question, with each group of
    the texture's channels set to zero."""

    def __init__(self, processing: ImageProcessor) -> None:
        self._processing = processing
        self._areas: dict[tuple[str, str], list[float]] = {
            (group, name): [] for group in CHANNEL_GROUPS for name in MAPS
        }

    def add(self, example: Example) -> None:
        height, width = example.image.shape[:2]
        x0, y0, x1, y1 = example.box
        if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
            return
        grid = shrink(self._processing.token_grid(width, height), LOOK)
        wanted = evidence_tokens(example.box, (width, height), grid)
        if wanted.all() or not wanted.any():
            return
        whole = texture(torch.from_numpy(np.ascontiguousarray(example.image)))
        for group, names in CHANNEL_GROUPS.items():
            some = whole.clone()
            for name in names:
                some[CHANNELS.index(name)] = 0
            for name, score in MAPS.items():
                self._areas[group, name].append(roc_area(score(some, grid).numpy(), wanted))

    def scores(self) -> tuple[ChannelScore, ...]:
        return tuple(
            ChannelScore(group, name, sum(areas) / len(areas), len(areas))
            for (group, name), areas in self._areas.items()
            if areas
        )


def evidence_tokens(box: tuple[float, ...], size: tuple[int, int], grid: Grid) -> NDArray[np.bool_]:
    """Tokens that hold at least half as much of the evidence as the token that holds most."""
    (x0, y0, x1, y1), (width, height), (rows, columns) = box, size, grid
    down, across = np.arange(rows + 1) * height / rows, np.arange(columns + 1) * width / columns
    high = np.clip(np.minimum(y1, down[1:]) - np.maximum(y0, down[:-1]), 0, None)
    wide = np.clip(np.minimum(x1, across[1:]) - np.maximum(x0, across[:-1]), 0, None)
    held = high[:, None] * wide[None]
    inside: NDArray[np.bool_] = (held >= held.max() / 2) & (held > 0)
    return inside


def roc_area(scores: NDArray[np.float32], wanted: NDArray[np.bool_]) -> float:
    """Probability that a wanted token scores above another one; ties count half."""
    ours, others = scores[wanted], scores[~wanted]
    above = (ours[:, None] > others[None]).mean(dtype=np.float64)
    same = (ours[:, None] == others[None]).mean(dtype=np.float64)
    return float(above + same / 2)


class AblationTrials(TrialFactory):
    def trial(self, example: Example, method: str, share: float | None) -> Trial:
        if method == FULL:
            return super().trial(example, FULL, share)
        whole = super().trial(example, BALANCED, share)
        if whole.lod is None:
            return replace(whole, method=method)
        lod = LodParams(budget=whole.lod.budget, **ABLATIONS[method])  # type: ignore[arg-type]
        return replace(whole, method=method, lod=lod)


def channel_rows(channels: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One row per group of the texture's channels."""
    areas = {(one["group"], one["map"]): one["area"] for one in channels}
    groups = dict.fromkeys(one["group"] for one in channels)
    return ["channels", *MAPS], [[group, *(f"{areas[group, name]:.3f}" for name in MAPS)] for group in groups]


def ablate(engine: EngineConfig, options: LodEvalOptions) -> tuple[LodReport, list[dict[str, Any]]]:
    """The answers, and the scores of the channels."""
    checkpoint = open_checkpoint(engine.model)
    channels = ChannelAblation(check_model(engine, options, checkpoint))
    report = compare_methods(engine, options, AblationTrials, tuple(ABLATIONS))
    seed = SEED if options.scenes is None else options.scenes
    for task, index in sample_keys(chosen_tasks(options.tasks), options.count, options.limit):
        channels.add(example(task, index, seed))
    return report, [asdict(one) for one in channels.scores()]


@click.command()
@click.argument("model", default="embedded")
@with_options(config_options(LodEvalOptions), ENGINE_OPTIONS)
def main(model: str, **given: Any) -> None:
    engine = engine_config(model, given)
    options = LodEvalOptions(**given)
    report, channels = ablate(engine, options)
    print_lod_report(report)
    if channels:
        output_console(options.json).print(table(ABOUT_CHANNELS, *channel_rows(channels)))
    write_json(options.json, as_json(report, channels=channels))


if __name__ == "__main__":
    main()
