"""Workloads of `saccade bench`, their scales, and its options. The command line imports this module, so it
imports no torch."""

import re
from dataclasses import dataclass, replace

from saccade.config import check_fields, option_field
from saccade.errors import ConfigError

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
TEXT_ONLY = ("start_to_ready", "text_bs", "text_throughput")  # need no vision model


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
    if name in WORKLOADS and "{" not in name:
        return Workload(name, name)
    raise ConfigError(f"there is no workload {name!r}; known are {', '.join(WORKLOADS)}")


def default_workloads(*, on_gpu: bool, vision: bool) -> tuple[str, ...]:
    """All workloads on a GPU, about a minute's work on a CPU."""
    names = ON_GPU if on_gpu else ON_CPU
    return tuple(name for name in names if vision or not parse_workload(name).needs_vision)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """None: the workload's own value (`SCALES`)."""

    workloads: tuple[str, ...] = option_field(
        (), "See below; repeat the option.", flag="--workload", metavar="NAME"
    )
    json: str | None = option_field(None, "Also write every sample to FILE; - is stdout.", metavar="FILE")
    requests: int | None = option_field(None, "Requests of the workloads that send many at once.")
    input_tokens: int | None = option_field(None, "Text tokens per prompt.")
    output_tokens: int | None = option_field(None, "Tokens of every answer.", at_least=2)
    image_size: tuple[int, int] | None = option_field(
        None, "Image size, where the workload's name does not contain it."
    )
    repeat: int | None = option_field(None, "Timed runs; the median is reported.")
    warmup: int = option_field(1, "Untimed runs before those.", at_least=0)
    phase_seconds: float = option_field(20.0, "Length of each phase of mixed_load.")
    text_rate: float = option_field(16.0, "Text requests per second in mixed_load.")
    image_rates: tuple[float, ...] = option_field(
        (6.0, 15.0),
        "Images per second in the later phases of mixed_load (repeat the option).",
        flag="--image-rate",
    )
    seed: int = option_field(0, at_least=0)  # of prompts, images and arrivals; `--seed` is the engine's
    threads: int | None = option_field(None, "CPU threads of torch.")
    progress: bool = option_field(True, "Show a progress bar on stderr.")

    def __post_init__(self) -> None:
        for name in self.workloads:
            parse_workload(name)
        check_fields(self)
        positive = (("phase_seconds", self.phase_seconds), ("text_rate", self.text_rate))
        for field, number in (*positive, *(("image_rate", rate) for rate in self.image_rates)):
            if not 0 < number <= 100_000:
                raise ConfigError(f"{field} is {number}; it must be positive and at most 100000")
        if self.image_size is not None and not all(1 <= side <= 16384 for side in self.image_size):
            raise ConfigError(f"image_size is {self.image_size}; each side must be 1 to 16384 pixels")


@dataclass(frozen=True)
class Scale:
    """How much of a workload is run."""

    requests: int = 1
    input_tokens: int = 64  # text tokens of one prompt
    output_tokens: int = 1
    size: tuple[int, int] = (1024, 1024)  # of images: width, height
    repeat: int = 3


SCALES = {
    "start_to_ready": Scale(repeat=1),
    "text_bs": Scale(input_tokens=512, output_tokens=256),
    "text_throughput": Scale(requests=256, input_tokens=512, output_tokens=256),
    "ttft_unique": Scale(repeat=10),
    "ttft_repeat": Scale(repeat=10),
    "vlm_unique": Scale(requests=128, output_tokens=64),
    "vlm_repeat": Scale(requests=128, output_tokens=64),
    "vlm_16img_x8q": Scale(requests=128, output_tokens=64),
    "mixed_load": Scale(input_tokens=130, output_tokens=64, repeat=1),
}
ONE_TOKEN = ("ttft_unique", "ttft_repeat")  # the answer is one token by definition
ONE_REQUEST = (*ONE_TOKEN, "start_to_ready", "mixed_load")  # mixed_load has rates instead
UNREPEATED = ("mixed_load",)  # each phase has many samples


def default_scale(workload: Workload) -> Scale:
    scale = SCALES[workload.kind]
    if workload.kind == "text_bs":
        return replace(scale, requests=workload.batch)
    return replace(scale, size=workload.size) if workload.size is not None else scale


def chosen_scale(workload: Workload, options: BenchOptions) -> Scale:
    """The workload's scale with the user's changes."""
    return changed_scale(default_scale(workload), workload, options)


def changed_scale(scale: Scale, workload: Workload, options: BenchOptions) -> Scale:
    """Numbers that are part of the workload's name are not changed."""
    kind = workload.kind
    if options.requests is not None and kind != "text_bs" and kind not in ONE_REQUEST:
        scale = replace(scale, requests=options.requests)
    if options.input_tokens is not None:
        scale = replace(scale, input_tokens=options.input_tokens)
    if options.output_tokens is not None and kind not in ONE_TOKEN:
        scale = replace(scale, output_tokens=options.output_tokens)
    if options.image_size is not None and workload.size is None:
        scale = replace(scale, size=options.image_size)
    if options.repeat is not None and kind not in UNREPEATED:
        scale = replace(scale, repeat=options.repeat)
    return scale
