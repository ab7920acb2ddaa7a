"""What the front hears of a sequence: its newest token, and with the first one what else has become known.

takes   a sequence whose newest token is its last
gives   a Delta; what is told once is not told again
"""

from collections.abc import Callable

from saccade.request import Delta, FinishReason, TokenLogprobs
from saccade.scheduler.sequence import Sequence


def news(
    sequence: Sequence,
    token: int,
    logprobs: TokenLogprobs | None,
    kept: tuple[int, ...],
    clock: Callable[[], float],
) -> Delta:
    """`kept`: slots of pictures whose features a later request would find."""
    group = sequence.group
    cached, group.cached = group.cached, 0
    zoomed, group.zoomed = group.zoomed, None
    finish = sequence.finish()
    return Delta(
        request_id=group.request.id,
        index=sequence.index,
        tokens=(token,),
        logprobs=(logprobs,) if logprobs else (),
        finish=finish,
        cached_tokens=cached,
        times=group.times(clock, last=finish is not None),
        zoomed=zoomed,
        kept=kept,
    )


def last_news(sequence: Sequence, finish: FinishReason, error: str | None, code: str | None) -> Delta:
    """Of a sequence that ends without another token."""
    group = sequence.group
    return Delta(
        request_id=group.request.id,
        index=sequence.index,
        finish=finish,
        error=error,
        code=code,
        zoomed=group.zoomed,
    )
