"""How a KV budget becomes blocks: one pool or two, each in its precision.

takes   what a user asked for, the bytes of a block in each precision
gives   numbers of blocks
never   imports torch: the planner (saccade.tools.planner) divides as the engine does
"""

from dataclasses import dataclass
from typing import Literal, get_args

from saccade.errors import ConfigError
from saccade.kv_cache.vision_blocks import SCOPES
from saccade.step_plan import Role

KVDtype = Literal["auto", "fp8", "int8"]
Views = Literal["all", "global"]

HALF = 0.5  # the vision pool's share of the bytes where nobody says


@dataclass(frozen=True)
class Shares:
    text: int  # blocks
    vision: int  # blocks of a pool for views, behind those; 0: one pool for everything
    compact: int  # of all blocks the last ones that are in 8 bits

    @property
    def blocks(self) -> int:
        return self.text + self.vision


@dataclass(frozen=True, kw_only=True)
class KVWish:
    """What a user asks of the KV cache; field by field as in `EngineConfig`."""

    cache_dtype: KVDtype = "auto"
    vision_dtype: KVDtype = "auto"
    vision_share: float | None = None
    vision_views: Views | None = None

    def __post_init__(self) -> None:
        for name, known in (("cache_dtype", KVDtype), ("vision_dtype", KVDtype), ("vision_views", Views)):
            value = getattr(self, name)
            if value not in get_args(known) and (value is not None or name != "vision_views"):
                choices = ", ".join(get_args(known))
                raise ConfigError(f"kv_{name} is {value!r}; choose one of {choices}")
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
        return SCOPES[self.vision_views or "all"] if self.split else frozenset()

    @property
    def text_format(self) -> str | None:
        return None if self.cache_dtype == "auto" else self.cache_dtype

    @property
    def vision_format(self) -> str | None:
        return self.text_format if self.vision_dtype == "auto" else self.vision_dtype

    @property
    def format(self) -> str | None:
        """The one 8-bit format in use."""
        return self.vision_format if self.split else self.text_format

    def divide_bytes(self, available: int, plain: int, small: int) -> Shares:
        """`plain` and `small` are the bytes of a block in the model's dtype and in 8 bits."""
        text = plain if self.text_format is None else small
        vision = plain if self.vision_format is None else small
        if not self.split:
            return self._shares(available // text, 0)
        theirs = int(available * (self.vision_share or HALF))
        spare = 1 if text != vision else 0  # a block of each kind that belongs to nobody
        return self._shares((available - theirs) // text - spare, theirs // vision - spare)

    def divide_blocks(self, blocks: int) -> Shares:
        """Where the number of blocks is given, of both kinds together."""
        if not self.split:
            return self._shares(blocks, 0)
        vision = min(max(round(blocks * (self.vision_share or HALF)), 1), blocks - 1)
        return self._shares(blocks - vision, vision)

    def cap(self, shares: Shares, most: int) -> Shares:
        """At most so many blocks of each pool."""
        return self._shares(min(shares.text, most), min(shares.vision, most))

    def _shares(self, text: int, vision: int) -> Shares:
        if text < 1 and not self.split:
            raise ConfigError("the KV cache has no room for a single block; give it more memory")
        if text < 1 or (self.split and vision < 1):
            raise ConfigError(
                f"the KV cache is divided into {max(text, 0)} blocks for text and {max(vision, 0)} for "
                "views; give it more memory, or change --kv-vision-share"
            )
        compact = text + vision if self.text_format else vision if self.vision_format else 0
        return Shares(text, vision, compact)
