"""The workloads that run on an engine in this process."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from PIL import Image
from rich.progress import Progress

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError, SaccadeError
from saccade.llm import LLM
from saccade.sampling_params import SamplingParams
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.options import BenchOptions, Scale, Workload, chosen_scale
from saccade.tools.report import median

QUESTIONS_PER_IMAGE = 8  # of vlm_16img_x8q
TTFT_PER_RUN = 9  # on a GPU a timed run is the median of so many: each takes only milliseconds

Better = Literal["lower", "higher"]
Parameters = Mapping[str, float | int | str]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of the table, with the samples it was made from."""

    workload: str
    metric: str
    unit: str
    value: float
    better: Better = "lower"
    samples: tuple[float, ...] = ()  # in the unit, in order
    parameters: Parameters = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.workload} {self.metric} came out as {self.value}")


def median_row(
    workload: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    *,
    better: Better = "lower",
    parameters: Parameters | None = None,
    note: str = "",
) -> Row:
    return Row(
        workload=workload,
        metric=metric,
        unit=unit,
        value=median(samples),
        better=better,
        samples=tuple(samples),
        parameters=parameters or {},
        note=note,
    )


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]  # one placeholder for the image
    image: Image.Image | None = None


class Answers(NamedTuple):
    seconds: float  # of the whole batch
    tokens: list[list[int]]


def greedy(output_tokens: int) -> SamplingParams:
    """Greedy, exactly that many tokens, whatever the checkpoint's defaults are."""
    return SamplingParams(
        max_tokens=output_tokens,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        ignore_eos=True,
    )


class Session:
    """An engine being measured: runs prompts, times them, refuses workloads that do not fit."""

    def __init__(self, llm: LLM, checkpoint: Checkpoint, options: BenchOptions, bar: Progress) -> None:
        self.llm = llm
        self.checkpoint = checkpoint
        self.options = options
        self.inputs = RandomInputs(checkpoint, llm.processor.tokenizer, options.seed)
        self._bar = bar

    @property
    def on_cuda(self) -> bool:
        return self.llm.engine.info.device.startswith("cuda")

    def scale(self, workload: Workload) -> Scale:
        return chosen_scale(workload, self.options)

    def generate(self, prompts: Sequence[Prompt], output_tokens: int) -> Answers:
        """Timed from the call to the last token, detokenisation included."""
        given: list[dict[str, Any]] = [
            {"prompt_token_ids": one.tokens} | ({} if one.image is None else {"images": [one.image]})
            for one in prompts
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(given, greedy(output_tokens), progress=False)
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        short = [len(answer) for answer in answers if len(answer) != output_tokens]
        if short:
            raise SaccadeError(f"an answer has {short[0]} tokens where {output_tokens} were asked for")
        return Answers(seconds, answers)

    def repeat(self, workload: Workload, times: int, once: Callable[[], T]) -> list[T]:
        """Results of `times` calls, after the warm-up."""
        warmup = self.options.warmup
        task = self._bar.add_task(workload.name, total=warmup + times)
        results = []
        for number in range(warmup + times):
            result = once()
            if number >= warmup:
                results.append(result)
            self._bar.advance(task)
        return results

    def require_context(self, workload: Workload, scale: Scale) -> int:
        """Tokens of one request; ConfigError if the engine cannot hold them."""
        visual = self._visual_tokens(scale.size) if workload.needs_vision else 0
        wanted = scale.input_tokens + scale.output_tokens + visual
        most = self.llm.engine.info.max_model_len
        if wanted > most:
            seen = f", {visual} of them for the image" if visual else ""
            raise ConfigError(
                f"{workload.name} asks for {wanted} tokens a request{seen}; the engine holds {most}: lower"
                " --input-tokens, --output-tokens or --image-size, or raise --max-model-len"
            )
        return wanted

    def require_batch(self, workload: Workload, scale: Scale) -> None:
        """ConfigError unless all requests fit into one decode batch."""
        info = self.llm.engine.info
        if scale.requests > info.max_num_seqs:
            raise ConfigError(
                f"{workload.name} runs {scale.requests} sequences together; the engine takes"
                f" {info.max_num_seqs}: raise --max-num-seqs"
            )
        blocks = scale.requests * -(-self.require_context(workload, scale) // info.block_size)
        if blocks > info.num_blocks:
            raise ConfigError(
                f"{workload.name} needs {blocks} KV blocks at once; the pool has {info.num_blocks}: enlarge"
                " it (--kv-cache-bytes), or lower --input-tokens or --output-tokens"
            )

    def _visual_tokens(self, size: tuple[int, int]) -> int:
        """An image's tokens with its start and end token."""
        processing = self.checkpoint.image
        if processing is None:
            raise ConfigError(f"{self.checkpoint.name} takes no images")
        rows, columns = processing.grid(*size)
        return rows * columns // processing.merge_size**2 + 2


def decode_step(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_batch(workload, scale)

    def prompts() -> list[Prompt]:
        return [Prompt(session.inputs.text(scale.input_tokens)) for _ in range(scale.requests)]

    def once() -> float:
        # New prompts each time, so that nothing is found in the prefix cache.
        first = session.generate(prompts(), 1).seconds
        whole = session.generate(prompts(), scale.output_tokens).seconds
        return (whole - first) / (scale.output_tokens - 1) * 1e3

    samples = session.repeat(workload, scale.repeat, once)
    parameters = {"batch": scale.requests, "in": scale.input_tokens, "out": scale.output_tokens}
    step = median(samples)
    rate = f"{scale.requests / step * 1e3:,.0f} tok/s" if step > 0 else ""
    return [median_row(workload.name, "step", "ms", samples, parameters=parameters, note=rate)]


def text_throughput(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_context(workload, scale)

    def once() -> float:
        prompts = [Prompt(session.inputs.text(scale.input_tokens)) for _ in range(scale.requests)]
        seconds = session.generate(prompts, scale.output_tokens).seconds
        return scale.requests * scale.output_tokens / seconds

    samples = session.repeat(workload, scale.repeat, once)
    parameters = {"requests": scale.requests, "in": scale.input_tokens, "out": scale.output_tokens}
    return [median_row(workload.name, "throughput", "tok/s", samples, better="higher", parameters=parameters)]


def time_to_first_token(session: Session, workload: Workload, *, known: bool) -> list[Row]:
    """Of a question about a new image, or about one that the caches know."""
    scale, inputs = session.scale(workload), session.inputs
    session.require_context(workload, scale)
    known_image = inputs.image(scale.size) if known else None

    def first_token() -> float:
        question = inputs.about_image(scale.input_tokens)
        image = inputs.image(scale.size) if known_image is None else known_image
        return session.generate([Prompt(question, image)], 1).seconds * 1e3

    if known:
        first_token()
    each = TTFT_PER_RUN if session.on_cuda else 1
    samples = session.repeat(
        workload, scale.repeat, lambda: statistics.median(first_token() for _ in range(each))
    )
    parameters: Parameters = {"size": "{}x{}".format(*scale.size), "in": scale.input_tokens, "each": each}
    return [median_row(workload.name, "ttft", "ms", samples, parameters=parameters)]


def vlm_throughput(
    session: Session, workload: Workload, *, per_image: int = 1, known: bool = False
) -> list[Row]:
    """All requests at once; request i is about image i modulo their number."""
    scale, inputs = session.scale(workload), session.inputs
    session.require_context(workload, scale)
    count = max(1, scale.requests // per_image)

    def once() -> float:
        images = [inputs.image(scale.size) for _ in range(count)]

        def prompts() -> list[Prompt]:
            return [
                Prompt(inputs.about_image(scale.input_tokens), images[number % count])
                for number in range(scale.requests)
            ]

        if known:
            session.generate(prompts(), 1)
        return scale.requests / session.generate(prompts(), scale.output_tokens).seconds

    samples = session.repeat(workload, scale.repeat, once)
    parameters: Parameters = {
        "requests": scale.requests,
        "images": count,
        "size": "{}x{}".format(*scale.size),
        "in": scale.input_tokens,
        "out": scale.output_tokens,
    }
    return [median_row(workload.name, "throughput", "req/s", samples, better="higher", parameters=parameters)]


RUN: dict[str, Callable[[Session, Workload], list[Row]]] = {
    "text_bs": decode_step,
    "text_throughput": text_throughput,
    "ttft_unique": partial(time_to_first_token, known=False),
    "ttft_repeat": partial(time_to_first_token, known=True),
    "vlm_unique": vlm_throughput,
    "vlm_repeat": partial(vlm_throughput, known=True),
    "vlm_16img_x8q": partial(vlm_throughput, per_image=QUESTIONS_PER_IMAGE),
}
