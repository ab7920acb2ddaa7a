"""`saccade eval`: asks an engine the fixed set's questions, scores the answers and writes the reports."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from rich.console import Console
from rich.progress import Progress

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.errors import ConfigError, SaccadeError
from saccade.inputs.image_processor import ImageProcessor
from saccade.llm import LLM, RequestOutput
from saccade.request import Pixels
from saccade.sampling_params import SamplingParams
from saccade.tools.environment import commit, fingerprint, run_info
from saccade.tools.evaluation.options import CURVE_FOLDER, EvalOptions, LodEvalOptions
from saccade.tools.evaluation.question_set import (
    Example,
    chosen_tasks,
    chunks,
    correct,
    default_workers,
    sample_keys,
)
from saccade.tools.evaluation.report import (
    EvalReport,
    print_report,
    question_entry,
    write_curve,
    write_report,
)
from saccade.tools.evaluation.resize import least_tokens, shrink, size_within
from saccade.tools.evaluation.scoring import Outcome, Pair, PeerAnswer, agreement
from saccade.tools.peer import PeerEngine, Prompt, load_peer, until_end
from saccade.tools.report import check_json_target, load_plotter, progress_bar


def run(engine: EngineConfig, options: EvalOptions) -> int:
    """Returns the exit status."""
    checkpoint = open_checkpoint(engine.model)
    engine, limits, processing = _check(engine, options, checkpoint)
    tasks = chosen_tasks(options.tasks)
    plotter = load_plotter() if options.curve else None
    weights, source = fingerprint(checkpoint), commit()  # now: both may change during a long run
    start = time.perf_counter()
    with running_engine(engine) as llm, progress_bar(options.progress, remaining=True) as bar:
        peer = None if options.peer is None else _load_peer(options.peer, checkpoint, llm)
        if fingerprint(checkpoint) != weights:
            raise SaccadeError("the checkpoint's weights changed while they were loaded; run it again")
        evaluation = Evaluation(llm, options, limits, processing, peer)
        evaluation.run(tasks, bar)
    report = EvalReport(
        run=run_info(engine, checkpoint, source),
        weights=weights,
        options=options,
        seconds=time.perf_counter() - start,
        questions=tuple(evaluation.questions),
        outcomes=tuple(evaluation.outcomes),
        agreement=agreement(str(options.peer), evaluation.pairs) if evaluation.pairs else None,
        pairs=tuple(evaluation.pairs),
    )
    print_report(report)
    write_report(report)
    if plotter is not None:
        written = write_curve(report, options.out or CURVE_FOLDER, plotter)
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"wrote {', '.join(map(str, written))}")
    return 0


def _check(
    engine: EngineConfig, options: EvalOptions, checkpoint: Checkpoint
) -> tuple[EngineConfig, tuple[int | None, ...], ImageProcessor]:
    """Refuses what cannot work before the engine is loaded. Gives the token limits the checkpoint can
    reach."""
    processing = check_model(engine, options, checkpoint)
    if options.batch > engine.max_queue:
        raise ConfigError(
            f"batch is {options.batch} and the queue holds {engine.max_queue}; lower --batch or raise"
            " --max-queue"
        )
    least = least_tokens(processing)
    if options.visual_tokens is not None and options.visual_tokens < least:
        raise ConfigError(
            f"visual_tokens is {options.visual_tokens}; {checkpoint.name} enlarges every image to at least"
            f" {least} tokens: use {least} or more"
        )
    limits = tuple(limit for limit in options.levels if limit is None or limit >= least)
    if options.peer is not None and engine.dtype == "auto":
        engine = replace(engine, dtype="float32")  # rounding must not decide a token-for-token comparison
    return engine, limits, processing


def check_model(
    engine: EngineConfig, options: EvalOptions | LodEvalOptions, checkpoint: Checkpoint
) -> ImageProcessor:
    if checkpoint.image is None or checkpoint.image_token_id is None:
        raise ConfigError(f"the questions are about images, and {checkpoint.name} takes none")
    if engine.load_format == "dummy":
        raise ConfigError("dummy weights have no right answers; leave out --load-format dummy")
    check_json_target(options.json)
    return checkpoint.image


@contextlib.contextmanager
def running_engine(config: EngineConfig) -> Iterator[LLM]:
    with contextlib.closing(LLM(config.model, progress=False, **config.options())) as llm:
        yield llm


def _load_peer(name: str, checkpoint: Checkpoint, llm: LLM) -> PeerEngine:
    info = llm.engine.info
    return load_peer(name, checkpoint, info.device, info.dtype, stop_at_end=True, remedy="leave out --peer")


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy decoding, whatever the checkpoint's defaults are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0)


def user_message(image: Pixels, text: str) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class SizedQuestion:
    """One request: an example with its image at some size, for every token limit that leads to that size."""

    example: Example
    image: Pixels  # [height, width, 3]
    limits: tuple[int | None, ...]
    text: str  # the question as it is sent


def at_sizes(
    example: Example, limits: Sequence[int | None], processing: ImageProcessor, instruction: str | None
) -> list[SizedQuestion]:
    """The requests of one example, one for each distinct image size."""
    native = example.image.shape[1], example.image.shape[0]
    levels: dict[tuple[int, int], list[int | None]] = {}
    for limit in limits:
        size = native if limit is None else size_within(native, limit, processing)
        levels.setdefault(size, []).append(limit)
    text = example.question if instruction is None else f"{example.question}\n{instruction}"
    return [
        SizedQuestion(example, shrink(example.image, size), tuple(same), text)
        for size, same in levels.items()
    ]


class Evaluation:
    """One pass over the questions; it collects the outcomes."""

    def __init__(
        self,
        llm: LLM,
        options: EvalOptions,
        limits: tuple[int | None, ...],
        processing: ImageProcessor,
        peer: PeerEngine | None,
    ) -> None:
        self._llm = llm
        self._options = options
        self._limits = limits
        self._processing = processing
        self._peer = peer
        self._end_ids = frozenset(llm.processor.checkpoint.eos_ids)
        self.questions: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []
        self.pairs: list[Pair] = []

    def run(self, tasks: tuple[str, ...], bar: Progress) -> None:
        options = self._options
        wanted = sample_keys(tasks, options.count, options.limit)
        workers = default_workers() if options.workers is None else options.workers
        shown = bar.add_task("answering", total=len(wanted))
        for examples in chunks(wanted, options.batch, workers):
            self.questions += map(question_entry, examples)
            asked = [
                one
                for example in examples
                for one in at_sizes(example, self._limits, self._processing, options.instruction)
            ]
            for start in range(0, len(asked), options.batch):
                self._answer(asked[start : start + options.batch])
            right = sum(outcome.right for outcome in self.outcomes) / len(self.outcomes)
            bar.update(shown, advance=len(examples), description=f"{examples[-1].task}, {right:.0%} right")

    def _answer(self, asked: Sequence[SizedQuestion]) -> None:
        messages = [user_message(one.image, one.text) for one in asked]
        outputs = self._llm.chat(messages, greedy(self._options.max_tokens), progress=False)
        for one, output in zip(asked, outputs, strict=True):
            outcomes = self._outcomes(one, output)
            self.outcomes += outcomes
            if self._peer is not None:
                self.pairs.append(self._compare(self._peer, one, output, outcomes[0]))

    def _outcomes(self, asked: SizedQuestion, output: RequestOutput) -> list[Outcome]:
        """One per token limit."""
        choice = output.outputs[0]
        height, width = asked.image.shape[:2]
        right = correct(asked.example, choice.text)
        tokens = tuple(until_end(choice.token_ids, self._end_ids))
        return [
            Outcome(
                task=asked.example.task,
                index=asked.example.index,
                limit=limit,
                size=(width, height),
                visual_tokens=output.usage.visual_tokens,
                text=choice.text,
                token_ids=tokens,
                finish=choice.finish_reason,
                right=right,
            )
            for limit in asked.limits
        ]

    def _compare(self, peer: PeerEngine, asked: SizedQuestion, output: RequestOutput, ours: Outcome) -> Pair:
        prompt = Prompt(peer.chat_tokens(asked.text), Image.fromarray(asked.image))
        (found,) = peer.generate([prompt], self._options.max_tokens)
        text = peer.decode(found.token_ids)
        theirs = PeerAnswer(
            prompt=tuple(prompt.tokens),
            visual_tokens=found.visual_tokens,
            token_ids=tuple(found.token_ids),
            text=text,
            right=correct(asked.example, text),
        )
        same = (theirs.prompt, theirs.visual_tokens) == (output.prompt_token_ids, output.usage.visual_tokens)
        return Pair(ours, theirs, same)
