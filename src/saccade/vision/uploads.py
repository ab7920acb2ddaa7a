"""Pixels on the device, sent once: for the global view, for the texture and for every zoomed view alike.

takes   arrays of pixels; which is which is a matter of identity, for views of one picture share its array
gives   their copies on the device
owns    the copies of arrays that are still alive, least recently used ones leave beyond a bound
never   keeps an array alive: pixels wait in shared memory, which goes back when their request ends
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from saccade.request import Pixels

MOST_BYTES = 128 << 20  # some 40 pictures of 1024 x 1024


class Uploads:
    def __init__(self, send: Callable[[Pixels], Tensor], most_bytes: int = MOST_BYTES) -> None:
        self._send = send
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, tuple[weakref.ref[Pixels], Tensor]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._kept.values())

    def send(self, pixels: Pixels) -> Tensor:
        """A copy on the device, to be read only."""
        name = id(pixels)
        known = self._kept.get(name)
        if known is not None and known[0]() is pixels:
            self._kept.move_to_end(name)
            return known[1]
        # The dead are looked for here and not when they die: that may happen in any thread.
        for other in [other for other, (array, _) in self._kept.items() if array() is None]:
            del self._kept[other]
        copy = self._send(pixels)
        self._kept[name] = weakref.ref(pixels), copy
        while self.nbytes > self._most_bytes:
            self._kept.popitem(last=False)
        return copy

    def check(self) -> None:
        """Raise unless the bound holds and every copy is of the array it is named for."""
        if self.nbytes > self._most_bytes:
            raise RuntimeError(f"{self.nbytes} bytes of pixels are kept; {self._most_bytes} may be")
        for name, (array, copy) in self._kept.items():
            alive = array()
            if alive is not None and (id(alive) != name or tuple(copy.shape) != alive.shape):
                raise RuntimeError("a copy is kept under another array's name")
