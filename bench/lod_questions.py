"""Questions about one image: one after the other, then all at once; at full detail, and with zooms.

Times are those that a caller of the library sees, input processing included. The first question about an
image is shown alone, because it encodes the image; `mean` is over all ten."""

import statistics
from collections.abc import Sequence

from bench.lod_asking import Level, LodBench, TimedQuestion, warm
from saccade.metrics import STAGES
from saccade.request import Pixels

QUESTIONS = 10
IMAGES = 5  # asked about one after the other
ROUNDS = 5  # of all at once, of which the median is rows
# What a question passes in this process; `prefill` is all of a prompt, with zooms what follows their choice.
SHOWN = ("prepare", "unpack", "queue", "look", "encode", "prefill", "decode")


def questions(
    bench: LodBench, sizes: Sequence[tuple[int, int]], levels: Sequence[Level], length: int
) -> None:
    """With answers of `length` tokens; the bench has its own afterwards."""
    usual, bench.answer_tokens = bench.answer_tokens, length
    for size in sizes:
        full = bench.full_tokens(size)
        turns = {}
        print(
            f"\n{QUESTIONS} questions about an image of {size[0]}x{size[1]}, answers of {length} tokens, "
            f"one after the other, about {IMAGES if bench.on_cuda else 1}; "
            f"milliseconds to the first token and to the last\n{'':>6} {'first one':>15} {'the others':>15}"
            f" {'mean':>7} {'spent':>6} {'encodes':>7} {'zooms':>6} {'found':>6}"
            f" {'prefix hit':>10}"
        )
        for number, level in enumerate(levels, start=1):
            warm(bench, size, level, full, 2)
            bench.begin(length, number)  # images of its own, for they are new; in every run the same
            images = [bench.image(size) for _ in range(IMAGES if bench.on_cuda else 1)]
            turns[level.name] = in_turn(bench, images, level, full)
        by_stage(turns)
        at_once(bench, size, levels, full)
    bench.answer_tokens = usual


def in_turn(bench: LodBench, images: Sequence[Pixels], level: Level, full: int) -> list[TimedQuestion]:
    before = bench.llm.engine.stats()
    asked = [
        [one for _ in range(QUESTIONS) for one in bench.questions(1, image, level, full)] for image in images
    ]
    after = bench.llm.engine.stats()
    encodes, zooms = after.encodes - before.encodes, after.zooms - before.zooms
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    queried = after.prefix_queried_tokens - before.prefix_queried_tokens
    begun = [first for first, *_ in asked]
    others = [one for _, *behind in asked for one in behind]
    every = begun + others
    print(
        f"{level.name:>6} {middle(begun, 'first'):7.1f} {middle(begun, 'whole'):7.1f}"
        f" {middle(others, 'first'):7.1f}"
        f" {middle(others, 'whole'):7.1f} {statistics.mean(one.whole for one in every):7.1f}"
        f" {statistics.mean(one.visual_tokens for one in every):6.0f} {encodes:7} {zooms:6}"
        f" {zooms + len(begun) - encodes:6} {hits / max(queried, 1):10.0%}",
        flush=True,
    )
    return others


def by_stage(turns: dict[str, list[TimedQuestion]]) -> None:
    """Of the questions behind the first: mean milliseconds, for few of them may have anything to encode."""
    rows = {name: [one.stages.seconds() for one in asked] for name, asked in turns.items()}
    names = [name for name in STAGES if name in SHOWN]
    print("by stage, mean of the others\n" + " " * 6 + "".join(f" {name:>8}" for name in names))
    for level, each in rows.items():
        means = [1e3 * statistics.mean(one.get(name, 0.0) for one in each) for name in names]
        print(f"{level:>6}" + "".join(f" {value:8.2f}" for value in means), flush=True)


def at_once(bench: LodBench, size: tuple[int, int], levels: Sequence[Level], full: int) -> None:
    """Twice: about an image nobody has seen, and again about the same."""
    print(
        f"all {QUESTIONS} at once, medians of {ROUNDS} rounds; ms a question (all of them / {QUESTIONS}), "
        f"first tokens: median and last\n"
        f"{'':>6} {'new image':>23} {'the same again':>23}"
    )
    for level in levels:
        rounds = []
        for _ in range(ROUNDS + 3 if bench.on_cuda else 1):  # shapes of these steps are captured after a few
            image = bench.image(size)
            rounds.append([bench.questions(QUESTIONS, image, level, full) for _ in range(2)])
        print(f"{level.name:>6}" + "".join(map(_cell, zip(*rounds[-ROUNDS:], strict=True))), flush=True)


def _cell(rounds: Sequence[Sequence[TimedQuestion]]) -> str:
    """Medians of some rounds."""
    whole = statistics.median(max(one.whole for one in asked) for asked in rounds)
    first = statistics.median(middle(asked, "first") for asked in rounds)
    last = statistics.median(max(one.first for one in asked) for asked in rounds)
    return f" {whole / QUESTIONS:7.1f} {first:7.1f} {last:7.1f}"


def middle(asked: Sequence[TimedQuestion], what: str) -> float:
    return statistics.median(float(getattr(one, what)) for one in asked)
