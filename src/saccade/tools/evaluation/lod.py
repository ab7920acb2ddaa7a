"""`saccade eval-lod`: the same questions with the same number of visual tokens, spent in different ways.

Constants are tuned on fresh scenes (`--scenes`); the fixed set only reports."""

import time
from collections.abc import Iterator, Sequence

from rich.progress import Progress

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.llm import LLM, RequestOutput
from saccade.lod.checkpoint_views import read_views
from saccade.tools.environment import commit, fingerprint, run_info
from saccade.tools.evaluation.command import check_model, greedy, running_engine, user_message
from saccade.tools.evaluation.lod_methods import (
    ABLATIONS,
    BALANCED,
    FULL,
    METHODS,
    RESIZE,
    ChannelAblation,
    Trial,
    TrialFactory,
    covered,
)
from saccade.tools.evaluation.lod_report import LodReport, LodResult, print_lod_report, write_lod_report
from saccade.tools.evaluation.options import LodEvalOptions
from saccade.tools.evaluation.question_set import (
    SEED,
    Example,
    chosen_tasks,
    chunks,
    correct,
    default_workers,
    sample_keys,
)
from saccade.tools.report import load_plotter, progress_bar


def run(engine: EngineConfig, options: LodEvalOptions) -> int:
    """Returns the exit status."""
    checkpoint = open_checkpoint(engine.model)
    processing = check_model(engine, options, checkpoint)
    plotter = None if options.out is None else load_plotter()
    trials = TrialFactory(processing, read_views(checkpoint.config, processing.factor).rule)
    tasks = chosen_tasks(options.tasks)
    weights, source, start = fingerprint(checkpoint), commit(), time.perf_counter()
    with running_engine(engine) as llm, progress_bar(options.progress, remaining=True) as bar:
        comparison = MethodComparison(llm, options, trials)
        comparison.run(tasks, bar)
    report = LodReport(
        run=run_info(engine, checkpoint, source),
        weights=weights,
        options=options,
        seconds=time.perf_counter() - start,
        results=tuple(comparison.results),
        channels=comparison.channels.scores(),
    )
    print_lod_report(report)
    write_lod_report(report, plotter)
    return 0


class MethodComparison:
    """One pass over the questions; each is asked with every method at every budget."""

    def __init__(self, llm: LLM, options: LodEvalOptions, trials: TrialFactory) -> None:
        self._llm = llm
        self._options = options
        self._factory = trials
        self._params = greedy(options.max_tokens)
        self.results: list[LodResult] = []
        self.channels = ChannelAblation(trials.processing)

    def run(self, tasks: tuple[str, ...], bar: Progress) -> None:
        options = self._options
        seed = SEED if options.scenes is None else options.scenes
        wanted = [(task, index, seed) for task, index in sample_keys(tasks, options.count, options.limit)]
        workers = default_workers() if options.workers is None else options.workers
        shown = bar.add_task("answering", total=len(wanted))
        for examples in chunks(wanted, options.batch, workers):
            found = self._answer([trial for one in examples for trial in self._trials(one)])
            if options.ablate:
                for example in examples:
                    self.channels.add(example)
            else:
                found += self._answer(list(self._resized_to_equal_tokens(found)))
            self.results += [result for _, result in found]
            best = [one.right for one in self.results if one.method == BALANCED]
            text = f"{examples[-1].task}, {sum(best) / len(best):.0%} right when balanced"
            bar.update(shown, advance=len(examples), description=text)

    def _trials(self, example: Example) -> Iterator[Trial]:
        yield self._factory.trial(example, FULL, None)
        methods: Sequence[str] = tuple(ABLATIONS) if self._options.ablate else METHODS
        for share in self._options.levels:
            for method in methods:
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
