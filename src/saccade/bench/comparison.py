"""Ours beside a peer: the same checkpoint, prompts, dtype and threads, in the same process and run.

Each round draws new questions and asks them three times: of us all at once, of the peer one at a time, of the
peer as one padded batch. Rounds interleave, so a noisy machine disturbs all three alike; ratios are taken per
round and their median is reported.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from saccade.bench.figures import Row, median_row
from saccade.bench.options import Workload
from saccade.bench.session import Question, Session


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
