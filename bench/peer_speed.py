"""Saccade beside Hugging Face transformers: speed, and how far the answers agree.

    python -m bench.peer_speed [MODEL] --workload peer_text --workload peer_single_448x448

The same checkpoint, prompts, dtype and threads in the same process. Rounds interleave, so a noisy machine
disturbs both alike; the median of the ratios per round is reported. Options are those of `saccade bench`."""

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import click

from bench.transformers_peer import TransformersPeer, common_prefix
from saccade.checkpoint import open_checkpoint
from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, with_options
from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.bench.command import BenchReport, cpu_threads
from saccade.tools.bench.options import BenchOptions, Scale, Workload, changed_scale
from saccade.tools.bench.workloads import Better, Parameters, Prompt, Row, Session, median_row
from saccade.tools.environment import commit, run_info
from saccade.tools.report import check_json_target, progress_bar

T = TypeVar("T")
SCALES = {
    "peer_text": Scale(requests=16, input_tokens=128, output_tokens=64),
    "peer_image": Scale(requests=16, input_tokens=32, output_tokens=32, size=(448, 448)),
    "peer_single": Scale(input_tokens=32, output_tokens=32),
}


@dataclass(frozen=True)
class PeerWorkload(Workload):
    @property
    def needs_vision(self) -> bool:
        return self.kind != "peer_text"


def parse(name: str) -> PeerWorkload:
    """peer_text: 16 text requests at once; peer_image: 16 image requests; peer_single_WxH: one question."""
    if found := re.fullmatch(r"peer_single_([1-9]\d{0,4})x([1-9]\d{0,4})", name):
        return PeerWorkload(name, "peer_single", size=(int(found[1]), int(found[2])))
    if name in ("peer_text", "peer_image"):
        return PeerWorkload(name, name)
    raise ConfigError(f"there is no workload {name!r}; known are peer_text, peer_image, peer_single_WxH")


def peer_scale(workload: Workload, options: BenchOptions) -> Scale:
    scale = changed_scale(SCALES[workload.kind], workload, options)
    if workload.size is None:
        return scale
    return replace(scale, size=workload.size, requests=1)


def compare(session: Session, workload: Workload, peer: TransformersPeer) -> list[Row]:
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


def _compare_single(session: Session, workload: Workload, peer: TransformersPeer) -> list[Row]:
    """One request at a time: TTFT and decode rate of both engines."""
    scale, inputs = peer_scale(workload, session.options), session.inputs
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


def _compare_batch(session: Session, workload: Workload, peer: TransformersPeer) -> list[Row]:
    scale, inputs = peer_scale(workload, session.options), session.inputs
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


def run(engine: EngineConfig, names: Sequence[str], options: BenchOptions) -> int:
    workloads = [parse(name) for name in names]
    if engine.load_format == "dummy":
        raise ConfigError("dummy weights are not the peer's weights; leave out --load-format dummy")
    check_json_target(options.json)
    checkpoint = open_checkpoint(engine.model)
    with (
        cpu_threads(options.threads),
        contextlib.closing(LLM(engine.model, progress=False, **engine.options())) as llm,
        progress_bar(options.progress) as bar,
    ):
        info = llm.engine.info
        peer = TransformersPeer(checkpoint, info.device, info.dtype, stop_at_end=False)
        session = Session(llm, checkpoint, options, bar)
        rows = [row for workload in workloads for row in compare(session, workload, peer)]
        report = BenchReport(run_info(engine, checkpoint, commit()), options, tuple(rows))
    report.show()
    return 0


@click.command()
@click.argument("model", default="embedded")
@with_options(config_options(BenchOptions), ENGINE_OPTIONS)
def main(model: str, **given: Any) -> None:
    engine = engine_config(model, given)
    names = given.pop("workloads") or ("peer_text", "peer_image")
    run(engine, names, BenchOptions(**given))


if __name__ == "__main__":
    main()
