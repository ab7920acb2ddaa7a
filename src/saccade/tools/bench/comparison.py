"""Ours beside a peer: the same checkpoint, prompts, dtype and threads, in the same process and run.

Each round draws new questions and asks them three times: of us all at once, of the peer one at a time, of the
peer as one padded batch. Rounds interleave, so a noisy machine disturbs all three alike; ratios are taken per
round and their median is reported.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from saccade.tools.bench.figures import Better, Row, median_row
from saccade.tools.bench.options import Workload
from saccade.tools.bench.session import Question, Session


class PeerEngine(Protocol):
    """What a peer's module offers."""

    name: str

    def one_at_a_time(self, questions: Sequence[Question], output_tokens: int) -> list[list[int]]: ...
    def padded_batch(self, questions: Sequence[Question], output_tokens: int) -> list[list[int]]: ...


@dataclass(frozen=True)
class Round:
    """Seconds of each way, and how alike the answers are."""

    ours: float
    single: float
    batch: float
    equal: int  # answers equal to the peer's, one at a time
    same_tokens: int  # tokens before the first difference, all answers together


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many answers are equal, and how many tokens stand before the first difference of each."""
    equal = same = 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(mine, other, strict=False))
        prefix = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same += prefix
        equal += prefix == len(mine) == len(other)
    return equal, same


def compare(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    if workload.kind == "peer_single":
        return _compare_single(session, workload, peer)
    return _compare_many(session, workload, peer)


def _compare_single(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    """One request at a time on both sides: the wait for the first token, and the pace of the others."""
    scale = session.scale(workload)
    session.require_context(workload, scale)
    inputs = session.inputs

    def once() -> tuple[float, float, float, float]:
        seconds = []
        for length in (1, scale.output_tokens):  # a new picture each: nothing is known from before
            questions = [Question(inputs.about_picture(scale.input_tokens), inputs.picture(scale.size))]
            seconds.append(session.ask(questions, length).seconds)
            seconds.append(_timed(partial(peer.one_at_a_time, questions, length))[0])
        return seconds[0], seconds[1], seconds[2], seconds[3]

    rounds = session.repeat(workload, scale.repeat, once)
    parameters: dict[str, int | float | str] = {
        "size": "{}x{}".format(*scale.size),
        "in": scale.input_tokens,
        "out": scale.output_tokens,
    }

    def row(metric: str, unit: str, samples: list[float], better: Better) -> Row:
        return median_row(workload.name, metric, unit, samples, better=better, parameters=parameters)

    rest = scale.output_tokens - 1
    return [
        row("saccade, ttft", "ms", [1e3 * first for first, _, _, _ in rounds], "lower"),
        row(f"{peer.name}, ttft", "ms", [1e3 * first for _, first, _, _ in rounds], "lower"),
        row("saccade, decoding", "tok/s", [rest / max(a - f, 1e-9) for f, _, a, _ in rounds], "higher"),
        row(f"{peer.name}, decoding", "tok/s", [rest / max(a - f, 1e-9) for _, f, _, a in rounds], "higher"),
        row("ratio, ttft", "x", [theirs / ours for ours, theirs, _, _ in rounds], "higher"),
        row("ratio, whole answer", "x", [theirs / ours for _, _, ours, theirs in rounds], "higher"),
    ]


def _compare_many(session: Session, workload: Workload, peer: PeerEngine) -> list[Row]:
    scale = session.scale(workload)
    session.require_context(workload, scale)
    inputs = session.inputs
    with_picture = workload.kind == "peer_image"
    # Prompts of different lengths, from half to all of `input_tokens`: what makes a padded batch pad.
    shortest = max(1, scale.input_tokens // 2)
    spread = scale.input_tokens - shortest + 1

    def draw(number: int) -> Question:
        length = shortest + number * 5 % spread
        if with_picture:
            return Question(inputs.about_picture(length), inputs.picture(scale.size))
        return Question(inputs.text(length))

    def once() -> Round:
        questions = [draw(number) for number in range(scale.requests)]
        ours = session.ask(questions, scale.output_tokens)
        single_seconds, single = _timed(lambda: peer.one_at_a_time(questions, scale.output_tokens))
        batch_seconds, _ = _timed(lambda: peer.padded_batch(questions, scale.output_tokens))
        equal, same = agreement(ours.answers, single)
        return Round(ours.seconds, single_seconds, batch_seconds, equal, same)

    rounds = session.repeat(workload, scale.repeat, once)
    size = {"size": "{}x{}".format(*scale.size)} if with_picture else {}
    parameters: dict[str, int | float | str] = {
        "requests": scale.requests,
        "in": f"{shortest}-{shortest + min(spread - 1, (scale.requests - 1) * 5)}",
        "out": scale.output_tokens,
        **size,
    }
    return _rows(workload.name, peer.name, rounds, scale.requests, scale.output_tokens, parameters)


def _rows(
    workload: str,
    peer: str,
    rounds: Sequence[Round],
    requests: int,
    output_tokens: int,
    parameters: dict[str, int | float | str],
) -> list[Row]:
    tokens = requests * output_tokens

    def row(metric: str, unit: str, take: Callable[[Round], float], note: str = "") -> Row:
        samples = [take(one) for one in rounds]
        return median_row(workload, metric, unit, samples, better="higher", parameters=parameters, note=note)

    together = f"{requests} at once"
    return [
        row(f"saccade, {together}", "tok/s", lambda one: tokens / one.ours),
        row(f"{peer}, one at a time", "tok/s", lambda one: tokens / one.single),
        row(f"{peer}, padded batch", "tok/s", lambda one: tokens / one.batch),
        row("ratio to one at a time", "x", lambda one: one.single / one.ours),
        row("ratio to padded batch", "x", lambda one: one.batch / one.ours),
        row("equal answers", "%", lambda one: 100 * one.equal / requests, "greedy, one at a time"),
        row("equal tokens", "%", lambda one: 100 * one.same_tokens / tokens, "before a first difference"),
    ]


def _timed(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
