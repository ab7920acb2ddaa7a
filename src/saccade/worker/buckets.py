"""Which sizes a step is padded to, so that few captured steps serve all: plain numbers, no device.

takes   a plan's rows
gives   the `Shape` of the captured step that can run them, or None where the ordinary way must
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from saccade.step_plan import ScheduledSequence

# Rows of one token where a step has nothing else; beside prompts fewer sizes: each costs a capture.
DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BESIDE = (0, 8, 32, 64, 128, 256)
# Of short prompts, all rows together. An H200 takes 7.1 ms for 64 and 9.8 for 256 beside some answers.
TOKENS = (64, 128, 192, 256, 384, 512)
BRIEF = (32, *TOKENS)  # of steps that only look: a question is short, and is computed once more afterwards
CHUNKS = (8, 32)  # rows of prompts; the captures made before they are needed are of few
BRIEF_CHUNKS = (1, *CHUNKS)  # prompts of early-exit steps: most have one question
TIERS = (4096, 16384, 65536)  # longest context of a row of one token; sets the splits of its attention
SMALL = 64  # rows: decode steps up to this many are captured before serving begins, the rest when idle
MOST = 176  # captured steps
SIGHTINGS = 3  # of a shape with prompts before it is worth a capture


class Shape(NamedTuple):
    """Sizes of a captured step, and how it ends."""

    decodes: int  # rows of one token, padding included
    tokens: int  # of prompts
    chunks: int  # rows of prompts
    longest: int
    ending: str  # greedy, drawn, logits; look: early exit, before the last layers, with nothing sampled
    sighted: bool = False  # some tokens of prompts are visual


class Division(NamedTuple):
    """A plan's rows as a captured step takes them; lines are counted over decodes, then chunks."""

    decodes: tuple[ScheduledSequence, ...]
    chunks: tuple[ScheduledSequence, ...]

    @property
    def sighted(self) -> bool:
        return any(row.spans for row in self.chunks)

    @property
    def looking(self) -> bool:
        """Whether a prompt looks at pictures."""
        return any(row.relevance_targets for row in self.chunks)


def divide(rows: Sequence[ScheduledSequence]) -> Division | None:
    """Rows of one token that yield one, then the others; None where a row needs what no captured step has."""
    decodes, chunks = [], []
    for row in rows:
        if (
            row.num_tokens == 1
            and row.sample
            and not row.spans
            and not row.relevance_targets
            and _straight(row)
        ):
            decodes.append(row)
        elif len(row.tokens) == row.num_tokens:
            chunks.append(row)
        else:  # a token only the device knows, at the end of others
            return None
    return Division(tuple(decodes), tuple(chunks))


def _straight(row: ScheduledSequence) -> bool:
    """Whether its one token stands at one number on all three axes, which is all a device row keeps."""
    positions = row.positions
    return positions.strides[0] == 0 or bool(positions[0, 0] == positions[1, 0] == positions[2, 0])


def tiers(longest: int) -> tuple[int, ...]:
    """The context tiers of a model whose sequences end at `longest`."""
    return (*(tier for tier in TIERS if tier < longest), longest)


def row_sizes(rows: int, *, prompts: bool) -> tuple[int, ...]:
    """Of rows of one token, up to the least that holds `rows`, the device rows there are."""
    sizes = BESIDE if prompts else DECODES
    return sizes[: bisect_left(sizes, rows) + 1]


def most_lines(rows: int) -> int:
    """Rows of one token of the largest captured step."""
    return max(row_sizes(rows, prompts=False)[-1], row_sizes(rows, prompts=True)[-1])


def shape_of(divided: Division, ending: str, most_rows: int, longest: int) -> Shape | None:
    """The least shape that holds the rows; `most_rows`: device rows there are."""
    decodes, chunks = divided
    tokens = sum(row.num_tokens for row in chunks)
    rows = _least(row_sizes(most_rows, prompts=bool(chunks)), len(decodes))
    if rows is None:
        return None
    context = max((row.start + 1 for row in decodes), default=1)
    tier = _least(tiers(longest), context)
    if tier is None:
        return None
    if not chunks:
        return Shape(rows, 0, 0, tier, ending)
    of_tokens, of_prompts = (BRIEF, BRIEF_CHUNKS) if ending == "look" else (TOKENS, CHUNKS)
    padded, prompts = _least(of_tokens, tokens), _least(of_prompts, len(chunks))
    if padded is None or prompts is None:
        return None
    return Shape(rows, padded, prompts, tier, ending, divided.sighted)


def first_shapes(most_rows: int, longest: int) -> list[Shape]:
    """What is captured before serving begins, the largest first: the others then fit into its memory."""
    tier = tiers(longest)[0]
    sizes = [size for size in row_sizes(most_rows, prompts=False) if size <= SMALL]
    prompts = [Shape(0, tokens, CHUNKS[0], tier, "greedy") for tokens in reversed(TOKENS)]
    return prompts + [Shape(size, 0, 0, tier, "greedy") for size in reversed(sizes)]


def later_shapes(most_rows: int, longest: int, *, vision: bool, looks: bool = False) -> list[Shape]:
    """What else short contexts meet, to be captured while there is nothing to do; few rows first."""
    tier, done = tiers(longest)[0], set(first_shapes(most_rows, longest))
    brief = [Shape(0, tokens, chunks, tier, "look") for chunks in BRIEF_CHUNKS[:2] for tokens in BRIEF[:2]]
    decodes = [(size, 0, 0) for size in row_sizes(most_rows, prompts=False)]
    beside = [(size, tokens, CHUNKS[0]) for size in row_sizes(most_rows, prompts=True) for tokens in TOKENS]
    kinds = [("greedy", False), ("greedy", True), ("drawn", False)]
    shapes = [
        Shape(*sizes, tier, ending, sighted)
        for ending, sighted in kinds
        for sizes in sorted(decodes + beside)
        if not sighted or (vision and sizes[1])
    ]
    return (brief if looks else []) + [shape for shape in shapes if shape not in done]


def unlike(shapes: Sequence[Shape]) -> list[Shape]:
    """One of each kind of which others launch the same kernels, but for their sizes."""

    def kind(s: Shape) -> tuple[object, ...]:
        large = s.decodes > SMALL, s.decodes + s.tokens > SMALL
        return *large, bool(s.decodes), bool(s.chunks), s.ending, s.sighted

    return list({kind(shape): shape for shape in shapes}.values())


def _least(sizes: Sequence[int], needed: int) -> int | None:
    place = bisect_left(sizes, needed)
    return sizes[place] if place < len(sizes) else None
