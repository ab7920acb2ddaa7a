"""Where the time of one request goes, from its first byte to its last token.

takes   stamps, as the request passes them on its way
gives   seconds by stage (the names are metrics.STAGES); the same as a Server-Timing header
never   reads the request: it knows times alone

    receive      reading the body
    prepare      parsing it, waiting for a thread
    tokenise     chat template and tokenizer
    fetch        getting pictures from where they are, reading their sizes
    unpack       decoding pictures; getting and decoding videos
    send         to the engine
    queue        waiting for a device row
    look         steps up to the choice of its zoomed views, where those are chosen
    encode       steps of the vision tower for its pictures
    prefill      the other steps up to its first token
    first_token  from the engine to the front
    decode       from the first token to the last
    total        from the first byte to the end

A stage that was not reached is left out; all but `total` add up to it, but for what writing the answer takes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from saccade.request import EngineTimes

Spent = Literal["tokenise", "fetch", "unpack"]


@dataclass(slots=True)
class RequestTiming:
    """The stamps (time.monotonic()) and sums (seconds) of one prompt."""

    arrived: float = 0.0
    read: float | None = None  # its body was there
    tokenise: float = 0.0
    fetch: float = 0.0
    unpack: float = 0.0
    sent: float | None = None  # to the engine
    engine: EngineTimes | None = None
    first: float | None = None  # its first token was here
    last: float | None = None  # and its latest

    @contextmanager
    def measure(self, on: Spent) -> Iterator[None]:
        """Adds the time of what is done inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            setattr(self, on, getattr(self, on) + time.monotonic() - began)

    @property
    def reached(self) -> str:
        """The stage it is in. The engine tells nothing before the first token: until then it is queued."""
        if self.read is None:
            return "receive"
        if self.sent is None:
            return "prepare"
        return "queue" if self.first is None else "decode"

    def seconds(self, end: float | None = None) -> dict[str, float]:
        """Seconds by stage, in order; with `end` the total too."""
        known: dict[str, float | None] = {}
        prepared = self.tokenise + self.fetch + self.unpack
        known["receive"] = _between(self.arrived, self.read)
        known["prepare"] = _between(self.read, self.sent, prepared)
        if self.sent is not None:
            known |= {"tokenise": self.tokenise}
            known |= {"fetch": self.fetch, "unpack": self.unpack} if self.fetch or self.unpack else {}
        if self.engine is not None:
            engine = self.engine
            known["send"] = _between(self.sent, engine.queued)
            known["queue"] = _between(engine.queued, engine.started)
            known |= {"look": engine.look} if engine.look else {}
            known |= {"encode": engine.encode} if engine.encode else {}
            known["prefill"] = _between(engine.started, engine.first, engine.encode + engine.look)
            known["first_token"] = _between(engine.first, self.first)
        known["decode"] = _between(self.first, self.last)
        known["total"] = _between(self.arrived, end)
        return {name: value for name, value in known.items() if value is not None}

    def header(self, end: float | None = None) -> bytes:
        """The value of a Server-Timing header: milliseconds by stage."""
        return ", ".join(
            f"{name};dur={value * 1e3:.2f}" for name, value in self.seconds(end).items()
        ).encode()


def _between(start: float | None, end: float | None, less: float = 0.0) -> float | None:
    return None if start is None or end is None else max(end - start - less, 0.0)
