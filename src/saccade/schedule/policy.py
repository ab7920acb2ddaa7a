"""Who goes next, how far, and who must give way: the decisions of the scheduler, as plain functions.

takes   numbers and sequences as they stand
gives   a decision
never   changes anything
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from saccade.errors import ContextTooLong, InvalidValue
from saccade.plan import Layout
from saccade.request import Request
from saccade.schedule.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_rows: int  # sequences on the device at a time
    max_step_tokens: int  # token budget of a step
    max_model_len: int  # tokens of a sequence, prompt and output together
    block_size: int  # tokens per KV block
    max_encode_patches: int  # of the vision tower in one step; a single larger view still goes, alone
    max_queue: int  # requests waiting; more are refused
    seed: int = 0  # root of the seeds of requests that name none

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def refuse_impossible(request: Request, layout: Layout, limits: Limits, pool_blocks: int) -> None:
    """Raise for a request that could not be answered even with the engine to itself."""
    sampling, prompt = request.sampling, len(layout.tokens)
    if prompt < 1:
        raise InvalidValue("the prompt is empty; it needs at least one token", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidValue(f"max_tokens is {sampling.max_tokens}; ask for at least 1", param="max_tokens")
    if sampling.n < 1:
        raise InvalidValue(f"n is {sampling.n}; ask for at least 1", param="n")
    if prompt >= limits.max_model_len:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, of which pictures take {_visual(layout)}; the context holds "
            f"{limits.max_model_len}, output included; shorten the prompt or use smaller pictures",
            param="prompt",
        )
    # The last token is only given out, never computed: it needs no place in the cache.
    most = min(prompt + sampling.max_tokens, limits.max_model_len) - 1
    if limits.blocks_for(most) > pool_blocks:
        raise ContextTooLong(
            f"{prompt} prompt tokens and up to {sampling.max_tokens} output tokens need "
            f"{limits.blocks_for(most)} KV blocks of {limits.block_size} tokens; the cache has "
            f"{pool_blocks}; shorten the prompt or lower max_tokens",
            param="max_tokens",
        )


def _visual(layout: Layout) -> int:
    return sum(span.view.tokens for span in layout.spans)


def chunk(remaining: int, budget: int, behind: int) -> int:
    """Tokens a sequence gets: all it can use, but one is left for each of the `behind` others in turn.

    The first in line gets at least one, so the oldest sequence moves at every step however small the
    budget; and however long its prompt, those behind it that only need their next token get that too.
    """
    return min(remaining, max(budget - behind, 1), budget)


def victim(running: Ordered[Sequence]) -> Sequence:
    """The latest arrival gives way: the oldest never does, so it ends, and then the next is the oldest."""
    return max(running, key=lambda sequence: sequence.handle)
