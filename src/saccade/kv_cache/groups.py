"""KV cache groups: layers of a model that share a block table. Torch-free.

A model declares its groups. Each group has pages, a block pool, a prefix cache and a block table of its own
(`StepPlan.table` entries name the group); a prefix is cached as far as every group has it. Today's models
have one full-attention group, and `resolve_groups` refuses what the engine does not implement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from saccade.errors import ConfigError

GroupKind = Literal["full_attention", "sliding_window", "cross_attention", "recurrent"]

IMPLEMENTED: frozenset[GroupKind] = frozenset({"full_attention"})


@dataclass(frozen=True)
class KVCacheGroup:
    name: str
    kind: GroupKind
    layers: tuple[int, ...]  # indices of the model's layers; layer layers[i] is at [i] of the group's pages
    kv_heads: int
    head_dim: int
    dtype: str  # as torch spells it, "bfloat16"
    block_size: int = 0  # tokens; 0: the engine's, which `resolve_groups` fills in


def full_attention(
    layers: int, kv_heads: int, head_dim: int, dtype: str, block_size: int = 0
) -> tuple[KVCacheGroup]:
    """The groups of a model whose layers all have the same full attention."""
    every = tuple(range(layers))
    return (KVCacheGroup("decoder", "full_attention", every, kv_heads, head_dim, dtype, block_size),)


def resolve_groups(groups: Sequence[KVCacheGroup], block_size: int) -> tuple[KVCacheGroup, ...]:
    """The groups with their block size. Raises for kinds that are not implemented, for layers in two groups
    and for block sizes that differ: hash chains of all groups are over the same blocks of tokens."""
    if not groups:
        raise ConfigError("the model declares no KV cache group")
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) != len(layers):
        raise ConfigError(f"a layer is in two KV cache groups: {[group.layers for group in groups]}")
    for group in groups:
        if group.kind not in IMPLEMENTED:
            raise ConfigError(
                f"KV cache group {group.name!r} is {group.kind}; this engine implements "
                f"{', '.join(sorted(IMPLEMENTED))}"
            )
        if group.block_size not in (0, block_size):
            raise ConfigError(
                f"KV cache group {group.name!r} has blocks of {group.block_size} tokens, the engine of "
                f"{block_size}; set --block-size {group.block_size}"
            )
    return tuple(replace(group, block_size=block_size) for group in groups)


def single_group(groups: Sequence[KVCacheGroup], block_size: int) -> KVCacheGroup:
    """The resolved group of a model with one. The scheduler allocates blocks for one group so far."""
    group, *others = resolve_groups(groups, block_size)
    if others:
        names = ", ".join(group.name for group in groups)
        raise ConfigError(f"the model has {len(groups)} KV cache groups ({names}); the scheduler serves one")
    return group
