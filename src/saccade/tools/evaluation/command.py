"""`saccade eval`: asks the set's questions, scores, reports."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.memory import resolve_device, resolve_dtype
from saccade.errors import ConfigError, SaccadeError
from saccade.inputs.image_processor import ImageProcessing
from saccade.llm import LLM, Output
from saccade.tools.bench.machine import commit, describe, versions
from saccade.tools.evaluation.ask import Asked, Asker, at_sizes
from saccade.tools.evaluation.comparison import Pair, PeerEngine, agreement
from saccade.tools.evaluation.curve import write_curve
from saccade.tools.evaluation.options import CURVE_FOLDER, EvalOptions
from saccade.tools.evaluation.question_set import chosen_tasks, chunks, default_workers, sample_keys
from saccade.tools.evaluation.report import Asking, Report, asking, print_report, write_json
from saccade.tools.evaluation.resize import least_tokens
from saccade.tools.evaluation.score import Outcome

# Peers by name; each is imported only when it is asked for.
PEERS = {"transformers": "saccade.tools.evaluation.peer"}
FINGERPRINT_BYTES = 16 << 20  # from each end of a weight file


class Source(NamedTuple):
    """What is being evaluated: names of the weights and of the engine's source."""

    weights: str
    commit: str | None


def run(engine: EngineConfig, options: EvalOptions) -> int:
    """Evaluate, print the table, write what was asked for; gives the exit status."""
    checkpoint = open_checkpoint(engine.model)
    engine, limits, processing = _checked(engine, options, checkpoint)
    tasks = chosen_tasks(options.tasks)
    source = Source(fingerprint(checkpoint), commit())  # before: a long run may outlast both
    start = time.perf_counter()
    with running(engine) as llm, progress_bar(options.progress) as bar:
        peer = None if options.peer is None else _load_peer(options, checkpoint, llm)
        if fingerprint(checkpoint) != source.weights:
            raise SaccadeError("the checkpoint's weights changed while they were loaded; run it again")
        evaluation = Evaluation(llm, options, limits, processing, peer)
        evaluation.ask(tasks, bar)
    report = _report(engine, options, checkpoint, source, evaluation, time.perf_counter() - start)
    print_report(report)
    write_json(report)
    if options.curve:
        written = write_curve(report, options.out or CURVE_FOLDER)
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"wrote {', '.join(map(str, written))}")
    return 0


class Evaluation:
    """One pass over the questions: collects outcomes as the chunks come."""

    def __init__(
        self,
        llm: LLM,
        options: EvalOptions,
        limits: tuple[int | None, ...],
        processing: ImageProcessing,
        peer: PeerEngine | None,
    ) -> None:
        self._options = options
        self._limits = limits
        self._processing = processing
        self._peer = peer
        self._asker = Asker(llm, options.max_tokens, options.batch)
        self.askings: list[Asking] = []
        self.outcomes: list[Outcome] = []
        self.pairs: list[Pair] = []

    def ask(self, tasks: tuple[str, ...], bar: Progress) -> None:
        options = self._options
        wanted = sample_keys(tasks, options.count, options.limit)
        workers = default_workers() if options.workers is None else options.workers
        shown = bar.add_task("answering", total=len(wanted))
        for examples in chunks(wanted, options.batch, workers):
            requests = [
                asked
                for example in examples
                for asked in at_sizes(example, self._limits, self._processing, options.instruction)
            ]
            self.askings += map(asking, examples)
            for asked, output in self._asker.answer(requests):
                self._collect(asked, output)
            right = sum(outcome.right for outcome in self.outcomes) / len(self.outcomes)
            bar.update(shown, advance=len(examples), description=f"{examples[-1].task}, {right:.0%} right")

    def _collect(self, asked: Asked, output: Output) -> None:
        outcomes = self._asker.outcomes(asked, output)
        self.outcomes += outcomes
        if self._peer is not None:
            theirs = self._peer.answer(asked)
            same = (theirs.prompt, theirs.visual_tokens) == (
                output.prompt_token_ids,
                output.usage.visual_tokens,
            )
            self.pairs.append(Pair(outcomes[0], theirs, same))


def _checked(
    engine: EngineConfig, options: EvalOptions, checkpoint: Checkpoint
) -> tuple[EngineConfig, tuple[int | None, ...], ImageProcessing]:
    """Refuses what cannot work before anything is loaded."""
    processing = checkpoint.image
    if processing is None or checkpoint.image_token_id is None:
        raise ConfigError(f"the questions are about pictures, and {checkpoint.name} takes none")
    if engine.load_format == "dummy":
        raise ConfigError("dummy weights have no right answers; leave out --load-format dummy")
    if options.batch > engine.max_queue:
        raise ConfigError(
            f"batch is {options.batch} and the queue holds {engine.max_queue}; lower --batch or raise"
            " --max-queue"
        )
    if options.json not in (None, "-") and not Path(str(options.json)).resolve().parent.is_dir():
        raise ConfigError(f"the folder of {options.json} does not exist; make it first")
    least = least_tokens(processing)
    if options.visual_tokens is not None and options.visual_tokens < least:
        raise ConfigError(
            f"visual_tokens is {options.visual_tokens}; {checkpoint.name} enlarges every picture to at least"
            f" {least} tokens: use {least} or more"
        )
    limits = tuple(limit for limit in options.levels if limit is None or limit >= least)
    if options.peer is not None and engine.dtype == "auto":
        engine = replace(engine, dtype="float32")  # token for token: rounding must not decide
    return engine, limits, processing


@contextlib.contextmanager
def running(config: EngineConfig) -> Iterator[LLM]:
    llm = LLM(config.model, progress=False, **config.options())
    try:
        yield llm
    finally:
        llm.close()


def _load_peer(options: EvalOptions, checkpoint: Checkpoint, llm: LLM) -> PeerEngine:
    name = str(options.peer)
    try:
        module = import_module(PEERS[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the peer {name} is not installed ({error.name} is missing); install it or leave out --peer"
        ) from error
    info = llm.engine.info
    peer: PeerEngine = module.Peer(checkpoint, info.device, info.dtype, options.max_tokens)
    return peer


def _report(
    engine: EngineConfig,
    options: EvalOptions,
    checkpoint: Checkpoint,
    source: Source,
    evaluation: Evaluation,
    seconds: float,
) -> Report:
    device = resolve_device(engine)
    dtype = str(resolve_dtype(engine, checkpoint, device)).removeprefix("torch.")
    return Report(
        model=checkpoint.name,
        weights=source.weights,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=source.commit,
        machine=describe(str(device)),
        versions=versions(),
        engine={**asdict(engine), "resolved_device": str(device), "resolved_dtype": dtype},
        options=options,
        seconds=seconds,
        askings=tuple(evaluation.askings),
        outcomes=tuple(evaluation.outcomes),
        agreement=agreement(str(options.peer), evaluation.pairs) if evaluation.pairs else None,
        pairs=tuple(evaluation.pairs),
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of the weights: sizes, beginnings and ends of the files. Reading all of a large one takes minutes."""
    digest = blake3()
    for path in checkpoint.weight_files():
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(FINGERPRINT_BYTES)
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(size.to_bytes(8, "little") + head + file.read())
    return digest.hexdigest(length=8)


def progress_bar(show: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not (show and console.is_terminal))
