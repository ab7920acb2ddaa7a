"""`saccade eval`: asks an engine the fixed set's questions, scores the answers and writes the reports."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.progress import Progress

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.errors import ConfigError, SaccadeError
from saccade.inputs.image_processor import ImageProcessor
from saccade.llm import LLM, RequestOutput
from saccade.request import Pixels
from saccade.sampling_params import SamplingParams
from saccade.tools.environment import commit, fingerprint, run_info
from saccade.tools.evaluation.question_set import (
    SEED,
    Example,
    chosen_tasks,
    chunks,
    correct,
    default_workers,
    sample_keys,
)
from saccade.tools.evaluation.report import EvalReport, Outcome, as_json, print_report
from saccade.tools.evaluation.resize import least_tokens, shrink, size_within
from saccade.tools.options import EvalOptions, QuestionOptions
from saccade.tools.report import check_json_target, progress_bar, write_json

E = TypeVar("E", bound="Evaluation")


def run(engine: EngineConfig, options: EvalOptions) -> int:
    """Returns the exit status."""
    report, _ = evaluate(engine, options, Evaluation)
    print_report(report)
    write_json(options.json, as_json(report))
    return 0


def evaluate(engine: EngineConfig, options: EvalOptions, kind: type[E]) -> tuple[EvalReport, E]:
    """Asks the questions; returns the report and the finished evaluation of that kind."""
    checkpoint = open_checkpoint(engine.model)
    limits, processing = _check(engine, options, checkpoint)
    weights, source = fingerprint(checkpoint), commit()  # now: both may change during a long run
    start = time.perf_counter()
    with running_engine(engine) as llm, progress_bar(options.progress, remaining=True) as bar:
        evaluation = kind(llm, options, limits, processing)
        if fingerprint(checkpoint) != weights:
            raise SaccadeError("the checkpoint's weights changed while they were loaded; run it again")
        ask_all(options, evaluation.answer, bar)
    report = EvalReport(
        run=run_info(engine, checkpoint, source),
        weights=weights,
        options=options,
        seconds=time.perf_counter() - start,
        questions=tuple(evaluation.questions),
        outcomes=tuple(evaluation.outcomes),
    )
    return report, evaluation


def _check(
    engine: EngineConfig, options: EvalOptions, checkpoint: Checkpoint
) -> tuple[tuple[int | None, ...], ImageProcessor]:
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
    return limits, processing


def check_model(engine: EngineConfig, options: QuestionOptions, checkpoint: Checkpoint) -> ImageProcessor:
    if checkpoint.image is None or checkpoint.image_token_id is None:
        raise ConfigError(f"the questions are about images, and {checkpoint.name} takes none")
    if engine.load_format == "dummy":
        raise ConfigError("dummy weights have no right answers; leave out --load-format dummy")
    check_json_target(options.json)
    chosen_tasks(options.tasks)
    return checkpoint.image


@contextlib.contextmanager
def running_engine(config: EngineConfig) -> Iterator[LLM]:
    with contextlib.closing(LLM(config.model, progress=False, **config.options())) as llm:
        yield llm


def ask_all(
    options: QuestionOptions, answer: Callable[[list[Example]], float], bar: Progress, seed: int = SEED
) -> None:
    """Draws the questions and passes them to `answer` in chunks; it returns the share of right answers."""
    chosen = sample_keys(chosen_tasks(options.tasks), options.count, options.limit)
    workers = default_workers() if options.workers is None else options.workers
    shown = bar.add_task("answering", total=len(chosen))
    for examples in chunks([(task, index, seed) for task, index in chosen], options.batch, workers):
        right = answer(examples)
        bar.update(shown, advance=len(examples), description=f"{examples[-1].task}, {right:.0%} right")


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
        self, llm: LLM, options: EvalOptions, limits: tuple[int | None, ...], processing: ImageProcessor
    ) -> None:
        self._llm = llm
        self._options = options
        self._limits = limits
        self._processing = processing
        self._end_ids = frozenset(llm.processor.checkpoint.eos_ids)
        self.questions: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []

    def answer(self, examples: Sequence[Example]) -> float:
        """Asks the questions at every limit; the share of right answers so far."""
        options = self._options
        names = ("task", "index", "kind", "question", "answer", "accepted")
        self.questions += [{name: getattr(example, name) for name in names} for example in examples]
        asked = [
            one
            for example in examples
            for one in at_sizes(example, self._limits, self._processing, options.instruction)
        ]
        for start in range(0, len(asked), options.batch):
            batch = asked[start : start + options.batch]
            messages = [user_message(one.image, one.text) for one in batch]
            outputs = self._llm.chat(messages, greedy(options.max_tokens), progress=False)
            for one, output in zip(batch, outputs, strict=True):
                self.record(one, output)
        return sum(outcome.right for outcome in self.outcomes) / len(self.outcomes)

    def record(self, asked: SizedQuestion, output: RequestOutput) -> None:
        """Adds an outcome for each token limit."""
        choice = output.outputs[0]
        height, width = asked.image.shape[:2]
        right = correct(asked.example, choice.text)
        tokens = tuple(until_end(choice.token_ids, self._end_ids))
        self.outcomes += [
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


def until_end(tokens: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end token."""
    stop = next((index for index, token in enumerate(tokens) if token in end_ids), len(tokens))
    return list(tokens[:stop])
