"""How features get from one tier to the next, as the store sees it: no torch, and no waiting.

takes   features as the device has them
gives   their copies in host memory, and back; for files the bytes
never   decides what moves
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Slab(NamedTuple):
    """Features as bytes: what a file holds."""

    dtype: str  # as safetensors spells it, "BF16"
    shape: tuple[int, ...]
    data: memoryview


class Arriving(Generic[T]):
    """Features on their way up. `arrive` gives them; the device, not the host, waits for the copy."""

    def __init__(self, arrive: Callable[[], T]) -> None:
        self.arrive = arrive


class Mover(Protocol[T]):
    """Copies begin when asked for and are over when what was given is used: nothing here waits, except for
    `slab`, which threads call."""

    def down(self, features: T) -> Any:
        """A copy in host memory."""

    def up(self, kept: Any) -> T | Arriving[T]:
        """A copy on the device."""

    def weigh(self, nbytes: int) -> int:
        """Bytes of host memory that so many on the device take."""

    def slab(self, kept: Any) -> Slab:
        """Its bytes, once they are there."""

    def blank(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, memoryview]:
        """Host memory to read features into, and its bytes."""


class AsTheyAre:
    """For features that live in host memory and are only names of features: simulations."""

    def down(self, features: Any) -> Any:
        return features

    def up(self, kept: Any) -> Any:
        return kept

    def weigh(self, nbytes: int) -> int:
        return nbytes

    def slab(self, kept: Any) -> Slab:
        raise NotImplementedError("names of features have no bytes")

    def blank(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, memoryview]:
        raise NotImplementedError("names of features have no bytes")
