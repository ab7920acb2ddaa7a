"""The workloads that run on an engine in this process, alone or beside a peer."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from rich.progress import Progress

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError, SaccadeError
from saccade.llm import LLM
from saccade.sampling_params import SamplingParams
from saccade.tools.bench.anchors import Scale, chosen_scale
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.options import BenchOptions, Workload
from saccade.tools.peer import PeerEngine, Prompt, common_prefix
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


# Workloads of our engine alone


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


# Workloads beside a peer: the same checkpoint, prompts, dtype and threads in the same process. Rounds
# interleave, so a noisy machine disturbs both alike; the median of the ratios per round is reported.


def compare(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    if workload.kind == "peer_single":
        return _compare_single(session, workload, peer)
    return _compare_batch(session, workload, peer)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Equal answers, and tokens before the first difference of each answer."""
    prefixes = [common_prefix(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    equal = sum(
        prefix == len(mine) == len(other) for prefix, mine, other in zip(prefixes, ours, theirs, strict=True)
    )
    return equal, sum(prefixes)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _compare_single(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    """One request at a time: TTFT and decode rate of both engines."""
    scale, inputs = session.scale(workload), session.inputs
    session.require_context(workload, scale)

    def once() -> tuple[float, float, float, float]:
        seconds = []
        for length in (1, scale.output_tokens):  # a new image each, so that no cache helps
            prompts = [Prompt(inputs.about_image(scale.input_tokens), inputs.image(scale.size))]
            seconds.append(session.generate(prompts, length).seconds)
            seconds.append(_timed(partial(peer.generate, prompts, length))[0])
        return seconds[0], seconds[1], seconds[2], seconds[3]

    rounds = session.repeat(workload, scale.repeat, once)
    size = "{}x{}".format(*scale.size)
    parameters: Parameters = {"size": size, "in": scale.input_tokens, "out": scale.output_tokens}
    rest = scale.output_tokens - 1
    columns: dict[str, tuple[str, Better, list[float]]] = {
        "saccade, ttft": ("ms", "lower", [1e3 * first for first, _, _, _ in rounds]),
        f"{peer.name}, ttft": ("ms", "lower", [1e3 * first for _, first, _, _ in rounds]),
        "saccade, decoding": ("tok/s", "higher", [rest / max(a - f, 1e-9) for f, _, a, _ in rounds]),
        f"{peer.name}, decoding": ("tok/s", "higher", [rest / max(a - f, 1e-9) for _, f, _, a in rounds]),
        "ratio, ttft": ("x", "higher", [theirs / ours for ours, theirs, _, _ in rounds]),
        "ratio, whole answer": ("x", "higher", [theirs / ours for _, _, ours, theirs in rounds]),
    }
    return [
        median_row(workload.name, metric, unit, samples, better=better, parameters=parameters)
        for metric, (unit, better, samples) in columns.items()
    ]


class _Round(NamedTuple):
    """Seconds of each engine, and how far the answers agree."""

    ours: float
    single: float  # the peer, one request at a time
    batch: float  # the peer, one padded batch
    equal: int  # answers equal to the peer's, one at a time
    same_tokens: int


def _compare_batch(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    scale, inputs = session.scale(workload), session.inputs
    session.require_context(workload, scale)
    with_image = workload.kind == "peer_image"
    # Prompts of different lengths, from half to all of `input_tokens`, so that a batch needs padding.
    shortest = max(1, scale.input_tokens // 2)
    spread = scale.input_tokens - shortest + 1

    def draw(number: int) -> Prompt:
        length = shortest + number * 5 % spread
        if with_image:
            return Prompt(inputs.about_image(length), inputs.image(scale.size))
        return Prompt(inputs.text(length))

    def once() -> _Round:
        prompts = [draw(number) for number in range(scale.requests)]
        out = scale.output_tokens
        ours = session.generate(prompts, out)
        single, answers = _timed(lambda: [peer.generate([one], out)[0].token_ids for one in prompts])
        batch, _ = _timed(lambda: peer.generate(prompts, out))
        return _Round(ours.seconds, single, batch, *agreement(ours.tokens, answers))

    rounds = session.repeat(workload, scale.repeat, once)
    parameters: Parameters = {
        "requests": scale.requests,
        "in": f"{shortest}-{shortest + min(spread - 1, (scale.requests - 1) * 5)}",
        "out": scale.output_tokens,
        **({"size": "{}x{}".format(*scale.size)} if with_image else {}),
    }
    tokens = scale.requests * scale.output_tokens

    def row(metric: str, unit: str, take: Callable[[_Round], float], note: str = "") -> Row:
        samples = [take(one) for one in rounds]
        return median_row(
            workload.name, metric, unit, samples, better="higher", parameters=parameters, note=note
        )

    return [
        row(f"saccade, {scale.requests} at once", "tok/s", lambda one: tokens / one.ours),
        row(f"{peer.name}, one at a time", "tok/s", lambda one: tokens / one.single),
        row(f"{peer.name}, padded batch", "tok/s", lambda one: tokens / one.batch),
        row("ratio to one at a time", "x", lambda one: one.single / one.ours),
        row("ratio to padded batch", "x", lambda one: one.batch / one.ours),
        row("equal answers", "%", lambda one: 100 * one.equal / scale.requests, "greedy, one at a time"),
        row("equal tokens", "%", lambda one: 100 * one.same_tokens / tokens, "before a first difference"),
    ]
