"""Views by their key, and by the picture they show.

takes   views, each with what is known of it
gives   those of a picture without a look at all the others
"""

from collections.abc import ItemsView, Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class Shows(Protocol):
    """Anything known of a view."""

    @property
    def content(self) -> bytes:
        """Of which picture."""


K = TypeVar("K", bound=Shows)


class Catalogue(Generic[K]):
    def __init__(self, entries: Mapping[bytes, K] | None = None) -> None:
        self._entries: dict[bytes, K] = {}
        self._of: dict[bytes, set[bytes]] = {}
        for key, entry in (entries or {}).items():
            self.add(key, entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> K:
        return self._entries[key]

    def get(self, key: bytes) -> K | None:
        return self._entries.get(key)

    def items(self) -> ItemsView[bytes, K]:
        return self._entries.items()

    def of(self, content: bytes) -> list[bytes]:
        """The views of a picture."""
        return list(self._of.get(content, ()))

    def add(self, key: bytes, entry: K) -> None:
        """In place of what was known of the view before."""
        self.take(key)
        self._entries[key] = entry
        self._of.setdefault(entry.content, set()).add(key)

    def take(self, key: bytes) -> K | None:
        """Out; None if it is not there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            views = self._of[entry.content]
            views.discard(key)
            if not views:
                del self._of[entry.content]
        return entry

    def check(self) -> None:
        """Raise unless both orders have the same views."""
        listed = {(content, key) for content, keys in self._of.items() for key in keys}
        if listed != {(entry.content, key) for key, entry in self._entries.items()}:
            raise RuntimeError("the views of pictures, and the pictures of views, differ")
