"""Options and workload names of `saccade bench`. The command line imports this module, so it imports no
torch."""

import re
from dataclasses import dataclass
from typing import Literal

from saccade.errors import ConfigError

Peer = Literal["transformers", "none"]

# Name -> what it measures. The user chooses the numbers `{N}`, `{W}` and `{H}`.
WORKLOADS = {
    "start_to_ready": "from starting an engine process until it can answer",
    "text_bs{N}": "one decode step at batch N: (time for all tokens - time for one) / (tokens - 1)",
    "text_throughput": "256 text requests at once, tokens per second",
    "ttft_unique_{W}x{H}": "time to first token of a question about a new image of W x H",
    "ttft_repeat": "time to first token of a new question about a known image",
    "vlm_unique": "128 requests at once, each about a new image, requests per second",
    "vlm_repeat": "the same images again with new questions, requests per second",
    "vlm_16img_x8q": "128 requests at once over 16 new images, requests per second",
    "mixed_load": "text streams over HTTP while images arrive: p50 and p99 of TTFT and ITL",
    "peer_text": "16 text requests at once beside a peer, in the same run",
    "peer_image": "16 image requests at once beside a peer, in the same run",
    "peer_single_{W}x{H}": "one question about a new image beside a peer: TTFT, tokens/s",
}
OWN_PROCESS = ("start_to_ready", "mixed_load")  # these start an engine process of their own

ON_CPU = ("start_to_ready", "text_bs1", "text_bs8", "ttft_unique_448x448", "ttft_repeat")
ON_GPU = (
    "start_to_ready",
    *(f"text_bs{batch}" for batch in (1, 8, 32, 128, 256)),
    "text_throughput",
    *(f"ttft_unique_{size}" for size in ("448x448", "1024x1024", "1920x1080")),
    "ttft_repeat",
    "vlm_unique",
    "vlm_repeat",
    "vlm_16img_x8q",
    "mixed_load",
)
PEERED = ("peer_text", "peer_image", "peer_single")
PEERED_BY_DEFAULT = ("peer_text", "peer_image")
TEXT_ONLY = ("start_to_ready", "text_bs", "text_throughput", "peer_text")  # need no vision model


@dataclass(frozen=True)
class Workload:
    name: str
    kind: str  # the name without its numbers
    batch: int = 0  # text_bs{N}
    size: tuple[int, int] | None = None  # width, height, if the name has them

    @property
    def needs_vision(self) -> bool:
        return self.kind not in TEXT_ONLY


def parse_workload(name: str) -> Workload:
    """Reads a workload's name; ConfigError lists the known ones."""
    if found := re.fullmatch(r"text_bs([1-9]\d{0,4})", name):
        return Workload(name, "text_bs", batch=int(found[1]))
    if found := re.fullmatch(r"ttft_unique_([1-9]\d{0,4})x([1-9]\d{0,4})", name):
        return Workload(name, "ttft_unique", size=(int(found[1]), int(found[2])))
    if found := re.fullmatch(r"peer_single_([1-9]\d{0,4})x([1-9]\d{0,4})", name):
        return Workload(name, "peer_single", size=(int(found[1]), int(found[2])))
    if name in WORKLOADS and "{" not in name:
        return Workload(name, name)
    raise ConfigError(f"there is no workload {name!r}; known are {', '.join(WORKLOADS)}")


def default_workloads(*, on_gpu: bool, vision: bool, peer: bool) -> tuple[str, ...]:
    """The workloads of the anchors on a GPU, about a minute's work on a CPU."""
    names = (ON_GPU if on_gpu else ON_CPU) + (PEERED_BY_DEFAULT if peer else ())
    return tuple(name for name in names if vision or not parse_workload(name).needs_vision)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """None: the workload's own value (`saccade.tools.bench.anchors`)."""

    workloads: tuple[str, ...] = ()  # empty: `default_workloads`
    json: str | None = None  # a file, or - for stdout (the table then goes to stderr)
    peer: Peer | None = None  # None: transformers on a CPU with a real checkpoint, else none
    requests: int | None = None  # of the workloads that run many at once
    input_tokens: int | None = None  # text tokens of a prompt
    output_tokens: int | None = None  # length of every answer
    image_size: tuple[int, int] | None = None  # width, height, if the name has none
    repeat: int | None = None  # timed runs; the median is reported
    warmup: int = 1  # untimed runs before
    phase_seconds: float = 20.0  # of each phase of mixed_load
    text_rate: float = 16.0  # text requests per second of mixed_load
    image_rates: tuple[float, ...] = (6.0, 15.0)  # images per second of its phases after the first
    seed: int = 0  # of prompts, images and arrivals
    threads: int | None = None  # CPU threads of torch; None: torch's default
    progress: bool = True

    def __post_init__(self) -> None:
        for name in self.workloads:
            parse_workload(name)
        least = {"requests": 1, "input_tokens": 1, "output_tokens": 2, "repeat": 1, "warmup": 0, "threads": 1}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ConfigError(f"{field} is {value}; it must be at least {low}")
        positive = (("phase_seconds", self.phase_seconds), ("text_rate", self.text_rate))
        for field, number in (*positive, *(("image_rate", rate) for rate in self.image_rates)):
            if not 0 < number <= 100_000:
                raise ConfigError(f"{field} is {number}; it must be positive and at most 100000")
        if self.image_size is not None and not all(1 <= side <= 16384 for side in self.image_size):
            raise ConfigError(f"image_size is {self.image_size}; each side must be 1 to 16384 pixels")
        peered = [parse_workload(name).kind in PEERED for name in self.workloads]
        if self.peer == "none" and any(peered):
            raise ConfigError("the peer workloads compare with a peer; leave out --peer none")
        if self.peer not in (None, "none") and self.workloads and not any(peered):
            names = ", ".join(name for name in WORKLOADS if name.startswith("peer_"))
            raise ConfigError(f"none of the workloads compares with a peer; add one of {names}")
