"""`saccade eval-lod`: the same questions with the same number of visual tokens, spent in different ways.

Constants are tuned on fresh scenes (`--scenes`); the fixed set only reports."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.llm import LLM, RequestOutput
from saccade.lod.checkpoint_views import read_views
from saccade.lod.types import SCORERS, Region
from saccade.tools.environment import RunInfo, commit, fingerprint, run_info
from saccade.tools.evaluation.command import (
    ask_all,
    check_model,
    greedy,
    running_engine,
    user_message,
)
from saccade.tools.evaluation.lod_methods import (
    BALANCED,
    FULL,
    METHODS,
    RANDOM,
    RESIZE,
    Trial,
    TrialFactory,
    covered,
)
from saccade.tools.evaluation.question_set import SEED, Example, correct
from saccade.tools.evaluation.report import TABLE_WIDTH
from saccade.tools.options import LodEvalOptions
from saccade.tools.report import json_with_questions, output_console, progress_bar, table, write_json

SCHEMA = 1
WITHOUT_TEXT = (RESIZE, RANDOM, *SCORERS)  # wrong answers of these are counted, not stored: too many


@dataclass(frozen=True)
class LodResult:
    """One answer."""

    task: str
    index: int
    question: str
    answer: str
    method: str
    share: float | None
    full_tokens: int
    visual_tokens: int
    text: str
    right: bool
    regions: tuple[Region, ...]
    covered: float  # share of the evidence's box in the best zoomed view
    gated: str | None


@dataclass(frozen=True)
class LodReport:
    run: RunInfo
    weights: str
    options: LodEvalOptions
    seconds: float
    results: tuple[LodResult, ...]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(one.method for one in self.results if one.method != FULL))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(one.task for one in self.results))

    def of(self, method: str, share: float | None, task: str | None = None) -> list[LodResult]:
        return [
            one
            for one in self.results
            if one.method == method
            and (method == FULL or one.share == share)
            and (task is None or one.task == task)
        ]


def run(engine: EngineConfig, options: LodEvalOptions) -> int:
    """Returns the exit status."""
    report = compare_methods(engine, options, TrialFactory, METHODS)
    print_lod_report(report)
    write_json(options.json, as_json(report))
    return 0


def compare_methods(
    engine: EngineConfig,
    options: LodEvalOptions,
    factory: type[TrialFactory],
    methods: Sequence[str],
) -> LodReport:
    """Asks every question with every method of `factory` at every budget."""
    checkpoint = open_checkpoint(engine.model)
    processing = check_model(engine, options, checkpoint)
    trials = factory(processing, read_views(checkpoint.config, processing.factor).rule)
    weights, source, start = fingerprint(checkpoint), commit(), time.perf_counter()
    with running_engine(engine) as llm, progress_bar(options.progress, remaining=True) as bar:
        comparison = MethodComparison(llm, options, trials, methods)
        ask_all(options, comparison.answer, bar, SEED if options.scenes is None else options.scenes)
    return LodReport(
        run=run_info(engine, checkpoint, source),
        weights=weights,
        options=options,
        seconds=time.perf_counter() - start,
        results=tuple(comparison.results),
    )


class MethodComparison:
    """One pass over the questions; each is asked with every method at every budget."""

    def __init__(
        self, llm: LLM, options: LodEvalOptions, trials: TrialFactory, methods: Sequence[str]
    ) -> None:
        self._llm = llm
        self._options = options
        self._factory = trials
        self._methods = methods
        self._params = greedy(options.max_tokens)
        self.results: list[LodResult] = []

    def answer(self, examples: Sequence[Example]) -> float:
        """Asks the questions; the share that `balanced` has answered right so far."""
        found = self._answer([trial for one in examples for trial in self._trials(one)])
        if RESIZE in self._methods:
            found += self._answer(list(self._resized_to_equal_tokens(found)))
        self.results += [result for _, result in found]
        return accuracy([one for one in self.results if one.method == BALANCED])

    def _trials(self, example: Example) -> Iterator[Trial]:
        yield self._factory.trial(example, FULL, None)
        for share in self._options.levels:
            for method in self._methods:
                if method != RESIZE or share is not None:
                    yield self._factory.trial(example, method, share)

    def _resized_to_equal_tokens(self, found: Sequence[tuple[Trial, LodResult]]) -> Iterator[Trial]:
        """For `auto`: the image resized to the tokens that the engine chose to spend."""
        for trial, result in found:
            if trial.method == BALANCED and trial.share is None:
                yield self._factory.resized(trial.example, result.visual_tokens, None, trial.full)

    def _answer(self, trials: list[Trial]) -> list[tuple[Trial, LodResult]]:
        """Equal requests are asked once. Plain ones go first, so that the others find the images in the
        cache."""
        outputs: dict[tuple[object, ...], RequestOutput] = {}
        different = {_key(trial): trial for trial in trials}
        for plain in (True, False):
            some = {key: trial for key, trial in different.items() if (trial.lod is None) is plain}
            if not some:
                continue
            answered = self._llm.chat(
                [user_message(trial.image, trial.example.question) for trial in some.values()],
                self._params,
                lod=[trial.lod for trial in some.values()],
                progress=False,
            )
            outputs.update(zip(some, answered, strict=True))
        return [(trial, _result(trial, outputs[_key(trial)])) for trial in trials]


def _key(trial: Trial) -> tuple[object, ...]:
    example = trial.example
    return (example.task, example.index, trial.image.shape, trial.lod)


def _result(trial: Trial, output: RequestOutput) -> LodResult:
    text = output.outputs[0].text
    zooms = trial.lod.zooms if trial.lod is not None else None
    chosen = zooms if zooms is not None else output.zoomed.regions if output.zoomed is not None else ()
    gated = output.zoomed.gated[0] if output.zoomed is not None and output.zoomed.gated else None
    regions = chosen[0] if chosen else ()
    return LodResult(
        task=trial.example.task,
        index=trial.example.index,
        question=trial.example.question,
        answer=trial.example.answer,
        method=trial.method,
        share=trial.share,
        full_tokens=trial.full,
        visual_tokens=output.usage.visual_tokens,
        text=text,
        right=correct(trial.example, text),
        regions=regions,
        covered=covered(trial.example.box, regions),
        gated=gated,
    )


def level_name(share: float | None) -> str:
    return "auto" if share is None else f"{100 * share:g}%"


def accuracy(some: Sequence[LodResult]) -> float:
    return sum(one.right for one in some) / len(some)


def tokens(some: Sequence[LodResult]) -> float:
    return sum(one.visual_tokens for one in some) / len(some)


def overall_rows(report: LodReport) -> tuple[list[str], list[list[str]]]:
    """One row per method: accuracy and mean tokens at every level."""
    levels = report.options.levels
    heads = ["method", *(level_name(share) for share in levels)]
    full = report.of(FULL, None)
    rows = [[FULL, *(_cell(full) for _ in levels)]]
    for method in report.methods:
        rows.append([method, *(_cell(report.of(method, share)) for share in levels)])
    return heads, rows


def _cell(some: Sequence[LodResult]) -> str:
    return f"{100 * accuracy(some):.1f} ({tokens(some):.0f})" if some else ""


def print_lod_report(report: LodReport) -> None:
    console = output_console(report.options.json, TABLE_WIDTH)
    title = f"{report.run.model} ({report.run.dtype}): accuracy in percent (visual tokens)"
    console.print(table(title, *overall_rows(report)))


def as_json(report: LodReport, **more: object) -> str:
    """`more`: further entries of the head."""
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "model": report.run.model,
        "weights": report.weights,
        "commit": report.run.commit,
        "date": report.run.date,
        "machine": report.run.machine,
        "dtype": report.run.dtype,
        "options": asdict(report.options),
        "seconds": round(report.seconds, 3),
        **more,
    }
    return json_with_questions(head, _questions(report), indent=1)


def _questions(report: LodReport) -> list[dict[str, Any]]:
    """One per question: by level and method [1 if right, tokens], and the text of a wrong answer."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for one in report.results:
        known = {"task": one.task, "index": one.index, "full": one.full_tokens}
        entry = found.setdefault((one.task, one.index), {**known, "answers": {}, "zooms": {}})
        level = FULL if one.method == FULL else level_name(one.share)
        has_content = [] if one.right or one.method in WITHOUT_TEXT else [one.text]
        entry["answers"].setdefault(level, {})[one.method] = [int(one.right), one.visual_tokens, *has_content]
        if one.method == BALANCED:
            boxes = [[*region.box, *region.grid] for region in one.regions]
            gated = {} if one.gated is None else {"gated": one.gated.partition(",")[0]}
            entry["zooms"][level] = {"views": boxes, "covered": round(one.covered, 2), **gated}
    return list(found.values())
