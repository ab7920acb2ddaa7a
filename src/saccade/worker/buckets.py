"""The shapes of CUDA graph steps: which sizes a batch is padded to, so that few graphs serve all. No
torch."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from saccade.step_plan import ScheduledSequence

DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # sequences of decode-only steps
MIXED_DECODES = (0, 8, 32, 64, 128, 256)  # the same beside prefills: fewer, for each size costs a capture
PREFILL_TOKENS = (64, 128, 192, 256, 384, 512)  # of all prefills. H200: 7.1 ms for 64, 9.8 for 256
PREFILLS = (8, 32)  # sequences in prefill
# Early-exit steps compute a short question, most often one.
EARLY_EXIT_TOKENS = (32, *PREFILL_TOKENS)
EARLY_EXIT_PREFILLS = (1, *PREFILLS)
CONTEXT_TIERS = (4096, 16384, 65536)  # longest context of a decode; sets the splits of its attention
WARMUP_DECODES = 64  # decode steps up to this size are captured before serving begins, the rest when idle
MAX_GRAPHS = 176
MIN_USES = 3  # of a shape with prefills before it is captured


class StepShape(NamedTuple):
    """Sizes of a CUDA graph step, padding included, and how it ends."""

    decodes: int  # sequences that decode one token
    prefill_tokens: int
    prefills: int  # sequences in prefill
    max_context: int  # of a decode
    # greedy; sampled: also random; logits: sampling is left to the caller; early_exit: below the last layers
    ending: str
    has_visual: bool = False  # some prefill tokens are visual

    @property
    def lines(self) -> int:
        """Sequences: decodes, then prefills."""
        return self.decodes + self.prefills


class SplitBatch(NamedTuple):
    """The sequences of a plan as a CUDA graph step takes them."""

    decodes: tuple[ScheduledSequence, ...]
    prefills: tuple[ScheduledSequence, ...]

    @property
    def has_visual(self) -> bool:
        return any(one.spans for one in self.prefills)

    @property
    def has_relevance_targets(self) -> bool:
        return any(one.relevance_targets for one in self.prefills)


def split_batch(scheduled: Sequence[ScheduledSequence]) -> SplitBatch | None:
    """None if a sequence needs what no CUDA graph step has."""
    decodes, prefills = [], []
    for one in scheduled:
        if _is_decode(one):
            decodes.append(one)
        elif len(one.tokens) == one.num_tokens:
            prefills.append(one)
        else:  # several tokens, of which only the device knows the last
            return None
    return SplitBatch(tuple(decodes), tuple(prefills))


def _is_decode(one: ScheduledSequence) -> bool:
    """One token that samples, with the same position on all three axes: a slot stores only one."""
    if one.num_tokens != 1 or not one.sample or one.spans or one.relevance_targets:
        return False
    positions = one.positions
    return positions.strides[0] == 0 or bool(positions[0, 0] == positions[1, 0] == positions[2, 0])


def context_tiers(max_model_len: int) -> tuple[int, ...]:
    return (*(tier for tier in CONTEXT_TIERS if tier < max_model_len), max_model_len)


def decode_sizes(max_seqs: int, *, mixed: bool) -> tuple[int, ...]:
    """Up to the least that holds `max_seqs` sequences."""
    sizes = MIXED_DECODES if mixed else DECODES
    return sizes[: bisect_left(sizes, max_seqs) + 1]


def max_decodes(max_seqs: int) -> int:
    """Decodes of the largest shape."""
    return max(decode_sizes(max_seqs, mixed=False)[-1], decode_sizes(max_seqs, mixed=True)[-1])


def choose_shape(split: SplitBatch, ending: str, max_seqs: int, max_model_len: int) -> StepShape | None:
    """The smallest shape that holds the batch; None if there is none."""
    decodes = _round_up(decode_sizes(max_seqs, mixed=bool(split.prefills)), len(split.decodes))
    context = max((one.start + 1 for one in split.decodes), default=1)
    tier = _round_up(context_tiers(max_model_len), context)
    if decodes is None or tier is None:
        return None
    if not split.prefills:
        return StepShape(decodes, 0, 0, tier, ending)
    early_exit = ending == "early_exit"
    tokens = _round_up(
        EARLY_EXIT_TOKENS if early_exit else PREFILL_TOKENS, sum(one.num_tokens for one in split.prefills)
    )
    prefills = _round_up(EARLY_EXIT_PREFILLS if early_exit else PREFILLS, len(split.prefills))
    if tokens is None or prefills is None:
        return None
    return StepShape(decodes, tokens, prefills, tier, ending, split.has_visual)


def first_shapes(max_seqs: int, max_model_len: int) -> list[StepShape]:
    """Shapes captured before serving begins, the largest first: the others then reuse its memory."""
    tier = context_tiers(max_model_len)[0]
    sizes = [size for size in decode_sizes(max_seqs, mixed=False) if size <= WARMUP_DECODES]
    prefills = [StepShape(0, tokens, PREFILLS[0], tier, "greedy") for tokens in reversed(PREFILL_TOKENS)]
    return prefills + [StepShape(size, 0, 0, tier, "greedy") for size in reversed(sizes)]


def later_shapes(
    max_seqs: int, max_model_len: int, *, visual: bool, early_exit: bool = False
) -> list[StepShape]:
    """Further shapes of short contexts, captured while the engine is idle; few sequences first."""
    tier, first = context_tiers(max_model_len)[0], set(first_shapes(max_seqs, max_model_len))
    early = [
        StepShape(0, tokens, prefills, tier, "early_exit")
        for prefills in EARLY_EXIT_PREFILLS[:2]
        for tokens in EARLY_EXIT_TOKENS[:2]
    ]
    sizes = [(size, 0, 0) for size in decode_sizes(max_seqs, mixed=False)]
    for size in decode_sizes(max_seqs, mixed=True):
        sizes += [(size, tokens, PREFILLS[0]) for tokens in PREFILL_TOKENS]
    shapes = [
        StepShape(*size, tier, ending, has_visual)
        for ending, has_visual in (("greedy", False), ("greedy", True), ("sampled", False))
        for size in sorted(sizes)
        if not has_visual or (visual and size[1])
    ]
    return (early if early_exit else []) + [shape for shape in shapes if shape not in first]


def distinct_kernels(shapes: Sequence[StepShape]) -> list[StepShape]:
    """One shape of each set that launches the same kernels."""

    def kind(s: StepShape) -> tuple[object, ...]:
        large = s.decodes > WARMUP_DECODES, s.decodes + s.prefill_tokens > WARMUP_DECODES
        return *large, bool(s.decodes), bool(s.prefills), s.ending, s.has_visual

    return list({kind(shape): shape for shape in shapes}.values())


def _round_up(sizes: Sequence[int], needed: int) -> int | None:
    index = bisect_left(sizes, needed)
    return sizes[index] if index < len(sizes) else None
