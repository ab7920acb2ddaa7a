"""Questions about one picture: one after the other, then all at once; at full detail, and with zooms.

takes   an engine to ask (`bench.lod_asking`), sizes of pictures, levels of detail
gives   three tables. Times are those a caller of the library sees, preparing the prompt included; the first
        question about a picture is apart, for it has the picture computed. `mean` is over all ten
"""

import statistics
from collections.abc import Sequence

from bench.lod_asking import Asked, Bench, Level, warm
from saccade.metrics import STAGES
from saccade.request import Pixels

QUESTIONS = 10
# What a question passes in this process; `prefill` is all of a prompt, with zooms what follows their choice.
SHOWN = ("prepare", "unpack", "queue", "look", "encode", "prefill", "decode")


def questions(bench: Bench, sizes: Sequence[tuple[int, int]], levels: Sequence[Level], length: int) -> None:
    """With answers of `length` tokens; the bench has its own afterwards."""
    usual, bench.answer_tokens = bench.answer_tokens, length
    for size in sizes:
        full = bench.full_tokens(size)
        turns = {}
        print(
            f"\n{QUESTIONS} questions about one picture of {size[0]}x{size[1]}, answers of {length} tokens, "
            f"one after the other; "
            f"milliseconds to the first token and to the last\n{'':>6} {'first one':>15} {'the others':>15}"
            f" {'mean':>7} {'spent':>6} {'encodes':>7} {'zooms':>6} {'found':>6} {'prefix hit':>10}"
        )
        for level in levels:
            warm(bench, size, level, full, 2)
            turns[level.name] = in_turn(bench, bench.picture(size), level, full)
        by_stage(turns)
        at_once(bench, size, levels, full)
    bench.answer_tokens = usual


def in_turn(bench: Bench, picture: Pixels, level: Level, full: int) -> list[Asked]:
    before = bench.llm.engine.stats()
    asked = [one for _ in range(QUESTIONS) for one in bench.questions(1, picture, level, full)]
    after = bench.llm.engine.stats()
    encodes, zooms = after.encodes - before.encodes, after.zooms - before.zooms
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    queried = after.prefix_queried_tokens - before.prefix_queried_tokens
    begun, *others = asked
    print(
        f"{level.name:>6} {begun.first:7.1f} {begun.whole:7.1f} {middle(others, 'first'):7.1f}"
        f" {middle(others, 'whole'):7.1f} {statistics.mean(one.whole for one in asked):7.1f}"
        f" {statistics.mean(one.visual_tokens for one in asked):6.0f} {encodes:7} {zooms:6}"
        f" {zooms + 1 - encodes:6} {hits / max(queried, 1):10.0%}",
        flush=True,
    )
    return others


def by_stage(turns: dict[str, list[Asked]]) -> None:
    """Of the questions behind the first: mean milliseconds, for few of them may have anything to encode."""
    told = {name: [one.stages.seconds() for one in asked] for name, asked in turns.items()}
    names = [name for name in STAGES if name in SHOWN]
    print("by stage, mean of the others\n" + " " * 6 + "".join(f" {name:>8}" for name in names))
    for level, each in told.items():
        means = [1e3 * statistics.mean(one.get(name, 0.0) for one in each) for name in names]
        print(f"{level:>6}" + "".join(f" {value:8.2f}" for value in means), flush=True)


def at_once(bench: Bench, size: tuple[int, int], levels: Sequence[Level], full: int) -> None:
    """Twice: about a picture nobody has seen, and again about the same."""
    print(
        f"all {QUESTIONS} at once; ms a question (all of them / {QUESTIONS}), first tokens: median and last\n"
        f"{'':>6} {'new picture':>23} {'the same again':>23}"
    )
    for level in levels:
        for _ in range(3 if bench.on_cuda else 1):  # shapes of these steps are captured after a few
            bench.questions(QUESTIONS, bench.picture(size), level, full)
        picture, cells = bench.picture(size), []
        for _ in range(2):
            asked = bench.questions(QUESTIONS, picture, level, full)
            whole, last = max(one.whole for one in asked), max(one.first for one in asked)
            cells.append(f" {whole / QUESTIONS:7.1f} {middle(asked, 'first'):7.1f} {last:7.1f}")
        print(f"{level.name:>6}" + "".join(cells), flush=True)


def middle(asked: Sequence[Asked], what: str) -> float:
    return statistics.median(float(getattr(one, what)) for one in asked)
