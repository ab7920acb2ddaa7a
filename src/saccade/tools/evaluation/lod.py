"""`saccade eval-lod`: the same questions with the same visual tokens, spent in different ways.

takes   a checkpoint, the fixed questions (or fresh ones, for tuning)
gives   a table, and where asked a page with a plot and every answer
never   tunes: constants are set on fresh scenes, the fixed set only reports
"""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import Progress

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.memory import resolve_device, resolve_dtype
from saccade.errors import ConfigError
from saccade.llm import LLM, Output
from saccade.lod.checkpoint_views import read_views
from saccade.tools.bench.machine import commit, describe
from saccade.tools.evaluation.ask import greedy
from saccade.tools.evaluation.channels import Channels
from saccade.tools.evaluation.command import fingerprint, progress_bar, running
from saccade.tools.evaluation.lod_report import LodReport, Result, print_lod, write_lod
from saccade.tools.evaluation.methods import ABLATIONS, BALANCED, FULL, METHODS, RESIZE, Bench, Trial, covered
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


def run(engine: EngineConfig, options: LodEvalOptions) -> int:
    """Evaluate, print the table, write what was asked for; gives the exit status."""
    checkpoint = open_checkpoint(engine.model)
    bench = _checked(engine, options, checkpoint)
    tasks = chosen_tasks(options.tasks)
    weights, source, start = fingerprint(checkpoint), commit(), time.perf_counter()
    with running(engine) as llm, progress_bar(options.progress) as bar:
        comparison = Comparison(llm, options, bench)
        comparison.ask(tasks, bar)
    device = resolve_device(engine)
    report = LodReport(
        model=checkpoint.name,
        weights=weights,
        commit=source,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(str(device)),
        dtype=str(resolve_dtype(engine, checkpoint, device)).removeprefix("torch."),
        options=options,
        seconds=time.perf_counter() - start,
        results=tuple(comparison.results),
        channels=comparison.channels.found(),
    )
    print_lod(report)
    write_lod(report)
    return 0


class Comparison:
    """One pass over the questions; each is asked in every way at every level."""

    def __init__(self, llm: LLM, options: LodEvalOptions, bench: Bench) -> None:
        self._llm = llm
        self._options = options
        self._bench = bench
        self._params = greedy(options.max_tokens)
        self.results: list[Result] = []
        self.channels = Channels(bench.processing)

    def ask(self, tasks: tuple[str, ...], bar: Progress) -> None:
        options = self._options
        fixed = sample_keys(tasks, options.count, options.limit)
        seed = SEED if options.scenes is None else options.scenes
        wanted = [(task, index, seed) for task, index in fixed]
        workers = default_workers() if options.workers is None else options.workers
        shown = bar.add_task("answering", total=len(wanted))
        for examples in chunks(wanted, options.batch, workers):
            found = self._answer([trial for one in examples for trial in self._trials(one)])
            if options.ablate:
                for example in examples:
                    self.channels.add(example)
            else:
                found += self._answer(list(self._equal(found)))
            self.results += [result for _, result in found]
            best = [one.right for one in self.results if one.method == BALANCED]
            told = f"{examples[-1].task}, {sum(best) / len(best):.0%} right when balanced"
            bar.update(shown, advance=len(examples), description=told)

    def _trials(self, example: Example) -> Iterator[Trial]:
        yield self._bench.trial(example, FULL, None)
        methods: Sequence[str] = tuple(ABLATIONS) if self._options.ablate else METHODS
        for share in self._options.levels:
            for method in methods:
                if method != RESIZE or share is not None:
                    yield self._bench.trial(example, method, share)

    def _equal(self, found: Sequence[tuple[Trial, Result]]) -> Iterator[Trial]:
        """Resizing to what was spent where the engine chose itself how much."""
        for trial, result in found:
            if trial.method == BALANCED and trial.share is None:
                yield self._bench.resized(trial.example, result.visual_tokens, None, trial.full)

    def _answer(self, trials: list[Trial]) -> list[tuple[Trial, Result]]:
        """Equal requests are asked once. Plain ones go first: the pictures' features are then there."""
        outputs: dict[tuple[object, ...], Output] = {}
        different = {_key(trial): trial for trial in trials}
        for plain in (True, False):
            some = [(key, trial) for key, trial in different.items() if (trial.lod is None) is plain]
            asked = (
                self._llm.chat(
                    [_messages(trial) for _, trial in some],
                    self._params,
                    lod=[trial.lod for _, trial in some],
                    progress=False,
                )
                if some
                else []
            )
            outputs.update(zip((key for key, _ in some), asked, strict=True))
        return [(trial, _result(trial, outputs[_key(trial)])) for trial in trials]


def _key(trial: Trial) -> tuple[object, ...]:
    example = trial.example
    return (example.task, example.index, trial.image.shape, trial.lod)


def _messages(trial: Trial) -> list[dict[str, object]]:
    content = [{"type": "image", "image": trial.image}, {"type": "text", "text": trial.example.question}]
    return [{"role": "user", "content": content}]


def _result(trial: Trial, output: Output) -> Result:
    text = output.outputs[0].text
    zooms = trial.lod.zooms if trial.lod is not None else None
    chosen = zooms if zooms is not None else output.zoomed.regions if output.zoomed is not None else ()
    gated = output.zoomed.gated[0] if output.zoomed is not None and output.zoomed.gated else None
    regions = chosen[0] if chosen else ()
    return Result(
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


def _checked(engine: EngineConfig, options: LodEvalOptions, checkpoint: Checkpoint) -> Bench:
    if checkpoint.image is None or checkpoint.image_token_id is None:
        raise ConfigError(f"the questions are about pictures, and {checkpoint.name} takes none")
    if engine.load_format == "dummy":
        raise ConfigError("dummy weights have no right answers; leave out --load-format dummy")
    if options.json not in (None, "-") and not Path(str(options.json)).resolve().parent.is_dir():
        raise ConfigError(f"the folder of {options.json} does not exist; make it first")
    return Bench(checkpoint.image, read_views(checkpoint.config, checkpoint.image.factor).rule)
