"""The sequences of a request that has just come: one for each of its n choices.

takes   a group, the limits
gives   its sequences, each with its own seed, rank and chain of block keys
"""

from collections.abc import Iterator

from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.scheduler import policy
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Group, Sequence, derive_seed


def choices_of(
    group: Group, limits: Limits, prefix: PrefixCache | None, handles: Iterator[int]
) -> list[Sequence]:
    request, layout = group.request, group.layout
    limit = limits.end_of(request)
    made = []
    for index, handle in zip(range(request.sampling.n), handles, strict=False):
        seed = derive_seed(request.sampling, limits.seed, request.id, index)
        chain = prefix.new_chain(request.salt, layout.spans) if prefix is not None else None
        rank = policy.rank(group.since, request.priority, handle, limits)
        made.append(Sequence(handle, group, index, seed, limit, chain, list(layout.tokens), rank))
    return made
