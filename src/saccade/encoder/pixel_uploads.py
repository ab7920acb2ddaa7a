"""Pixels on the device, sent once: for the global view, for the texture and for every zoomed view alike.

takes   arrays of pixels, with the identity of their picture where it is known: every question brings an array
        of its own
gives   their copies on the device
owns    the copies; least recently used ones leave beyond a bound. Of pictures without an identity, and of
        deleted ones, there is a copy only while the array is alive
never   keeps an array alive: pixels wait in shared memory, which goes back when their request ends
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from saccade.request import Pixels

MOST_BYTES = 128 << 20  # some 40 pictures of 1024 x 1024
DELETED = 4096  # pictures known as deleted: more than there are requests on their way


class Uploads:
    def __init__(self, send: Callable[[Pixels], Tensor], most_bytes: int = MOST_BYTES) -> None:
        self._send = send
        self._most_bytes = most_bytes
        # By the picture's identity, else the array's.
        self._kept: OrderedDict[bytes | int, tuple[weakref.ref[Pixels], Tensor]] = OrderedDict()
        self._deleted: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._kept.values())

    def send(self, pixels: Pixels, content: bytes = b"") -> Tensor:
        """A copy on the device, to be read only. `content`: the picture's identity, if it has one."""
        name = content if content and content not in self._deleted else id(pixels)
        known = self._kept.get(name)
        if known is not None and (
            known[1].shape == pixels.shape if name == content else known[0]() is pixels
        ):
            self._kept.move_to_end(name)
            return known[1]
        # The dead are looked for here and not when they die: that may happen in any thread.
        arrays = [(other, array) for other, (array, _) in self._kept.items() if isinstance(other, int)]
        for other in [other for other, array in arrays if array() is None]:
            del self._kept[other]
        copy = self._send(pixels)
        self._kept[name] = weakref.ref(pixels), copy
        while self.nbytes > self._most_bytes:
            self._kept.popitem(last=False)
        return copy

    def forget(self, content: bytes) -> None:
        """A picture was deleted. Requests on their way may still send it; no copy outlives theirs."""
        self._kept.pop(content, None)
        self._deleted[content] = None
        self._deleted.move_to_end(content)
        while len(self._deleted) > DELETED:
            self._deleted.popitem(last=False)

    def check(self) -> None:
        """Raise unless the bound holds, every copy is of the array it is named for and none of a picture that
        was deleted."""
        if self.nbytes > self._most_bytes:
            raise RuntimeError(f"{self.nbytes} bytes of pixels are kept; {self._most_bytes} may be")
        for name, (array, copy) in self._kept.items():
            alive = array()
            other = isinstance(name, int) and id(alive) != name
            if alive is not None and (other or tuple(copy.shape) != alive.shape):
                raise RuntimeError("a copy is kept under another array's name")
            if name in self._deleted:
                raise RuntimeError("a copy of a deleted picture is kept under its name")
