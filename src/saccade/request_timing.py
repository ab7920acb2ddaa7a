"""The time of one request by stage, from its first byte to its last token.

    receive      reading the body
    prepare      parsing it, waiting for a thread
    tokenise     chat template and tokenizer
    fetch        fetching images and reading their sizes
    unpack       decoding images; fetching and decoding videos
    send         to the engine core
    queue        waiting for a slot
    look         steps up to the choice of its zoomed views (LOD only)
    encode       steps of the vision encoder for its images
    prefill      the other steps up to its first token
    first_token  from the engine core to the API server
    decode       from the first token to the last
    total        from the first byte to the end

Stages that were not reached are left out. The others add up to `total`, less the time to encode the response.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from saccade.request import EngineTimes

MeasuredStage = Literal["tokenise", "fetch", "unpack"]


@dataclass(slots=True)
class RequestTiming:
    """Timestamps (time.monotonic()) and durations (seconds) of one prompt."""

    arrived: float = 0.0
    read: float | None = None  # body complete
    tokenise: float = 0.0
    fetch: float = 0.0
    unpack: float = 0.0
    sent: float | None = None  # to the engine core
    engine: EngineTimes | None = None
    first: float | None = None  # first token received
    last: float | None = None  # latest token received

    @contextmanager
    def measure(self, stage: MeasuredStage) -> Iterator[None]:
        """Adds the time spent inside to `stage`."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, stage, getattr(self, stage) + time.monotonic() - start)

    @property
    def reached(self) -> str:
        """The current stage. The engine reports nothing before the first token: until then it is `queue`."""
        if self.read is None:
            return "receive"
        if self.sent is None:
            return "prepare"
        return "queue" if self.first is None else "decode"

    def seconds(self, end: float | None = None) -> dict[str, float]:
        """Seconds by stage, in order; with `end`, the total too."""
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
