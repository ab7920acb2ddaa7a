"""KV block pools: the sizes and dtypes of the text and the vision pool, and which blocks belong to which.

Torch-free: the capacity planner divides memory exactly as the engine does.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

from saccade.errors import ConfigError
from saccade.step_plan import Role, Span

KVDtype = Literal["auto", "fp8", "int8"]
VisionScope = Literal["all", "global"]

# Views whose blocks a vision pool can hold: all whole images and frames, or only those at reduced detail.
# Zoomed views never go there: their blocks are reserved before their number is known.
VISION_SCOPES: dict[str, frozenset[Role]] = {
    "all": frozenset({"whole", "global"}),
    "global": frozenset({"global"}),
}
DEFAULT_VISION_SHARE = 0.5  # of the KV bytes


@dataclass(frozen=True)
class PoolSizes:
    text: int  # blocks
    vision: int  # blocks of the vision pool, numbered after the text pool's; 0: one pool for everything
    compact: int  # how many of all blocks, the last ones, are quantized to 8 bits

    @property
    def blocks(self) -> int:
        return self.text + self.vision


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """The user's KV cache options; fields as in `EngineConfig` without the prefix kv_."""

    cache_dtype: KVDtype = "auto"
    vision_dtype: KVDtype = "auto"
    vision_share: float | None = None
    vision_views: VisionScope | None = None

    def __post_init__(self) -> None:
        share = self.vision_share
        if share is not None and (isinstance(share, bool) or not 0 < share < 1):
            raise ConfigError(f"kv_vision_share is {share}; it is a share of the KV cache between 0 and 1")
        if self.cache_dtype != "auto" and self.vision_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype {self.cache_dtype} is for all blocks, those of views too; leave out "
                f"kv_vision_dtype {self.vision_dtype}"
            )

    @property
    def split(self) -> bool:
        """Whether views have a pool of their own."""
        asked = self.vision_share is not None or self.vision_views is not None
        return asked or self.vision_dtype != "auto"

    @property
    def roles(self) -> frozenset[Role]:
        return VISION_SCOPES[self.vision_views or "all"] if self.split else frozenset()

    @property
    def text_format(self) -> str | None:
        return None if self.cache_dtype == "auto" else self.cache_dtype

    @property
    def vision_format(self) -> str | None:
        return self.text_format if self.vision_dtype == "auto" else self.vision_dtype

    @property
    def format(self) -> str | None:
        """The 8-bit format in use, if any."""
        return self.vision_format if self.split else self.text_format

    def divide_bytes(self, available: int, plain: int, small: int) -> PoolSizes:
        """`plain` and `small` are the bytes of a block in the model's dtype and in 8 bits."""
        text = plain if self.text_format is None else small
        vision = plain if self.vision_format is None else small
        if not self.split:
            return self._sizes(available // text, 0)
        vision_bytes = int(available * (self.vision_share or DEFAULT_VISION_SHARE))
        spare = 1 if text != vision else 0  # each storage has a padding block when there are two
        return self._sizes((available - vision_bytes) // text - spare, vision_bytes // vision - spare)

    def divide_blocks(self, blocks: int) -> PoolSizes:
        """Divide a given number of blocks."""
        if not self.split:
            return self._sizes(blocks, 0)
        share = self.vision_share or DEFAULT_VISION_SHARE
        vision = min(max(round(blocks * share), 1), blocks - 1)
        return self._sizes(blocks - vision, vision)

    def cap(self, sizes: PoolSizes, most: int) -> PoolSizes:
        """At most `most` blocks in each pool."""
        return self._sizes(min(sizes.text, most), min(sizes.vision, most))

    def _sizes(self, text: int, vision: int) -> PoolSizes:
        if text < 1 and not self.split:
            raise ConfigError("the KV cache has no room for a single block; give it more memory")
        if text < 1 or (self.split and vision < 1):
            raise ConfigError(
                f"the KV cache is divided into {max(text, 0)} blocks for text and {max(vision, 0)} for "
                "views; give it more memory, or change --kv-vision-share"
            )
        compact = text + vision if self.text_format else vision if self.vision_format else 0
        return PoolSizes(text, vision, compact)


class VisionBlocks:
    """Which blocks of a sequence belong to the vision pool: those that hold nothing but views of `roles`.

    Such a block is computed with its image, never written again and shared by all questions about the image.
    Blocks with text or zoomed views in them belong to the text pool.
    """

    def __init__(self, spans: Sequence[Span], block_size: int, roles: Set[Role]) -> None:
        runs = ((-(-start // block_size), stop // block_size) for start, stop in _token_runs(spans, roles))
        self._indices = [index for first, last in runs for index in range(first, last)]

    def among(self, start: int, stop: int) -> int:
        """How many of the blocks start .. stop are vision blocks."""
        return max(bisect_left(self._indices, stop) - bisect_left(self._indices, start), 0)

    def __contains__(self, index: int) -> bool:
        return bool(self.among(index, index + 1))


def _token_runs(spans: Sequence[Span], roles: Set[Role]) -> list[tuple[int, int]]:
    """Token ranges of views of these roles; adjacent views are joined."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if span.role not in roles:
            continue
        if runs and runs[-1][1] == span.start:
            runs[-1] = runs[-1][0], span.stop
        else:
            runs.append((span.start, span.stop))
    return runs
