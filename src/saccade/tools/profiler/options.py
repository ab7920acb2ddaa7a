"""Options of `saccade profile`. The command line imports this module, so it imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    batch: int = 8  # sequences that decode together
    context: int = 512  # tokens of each, and of the prompt
    image_size: tuple[int, int] = (1024, 1024)  # width, height
    steps: int = 8  # decode steps in the trace
    repeat: int = 3  # timed runs without the profiler; the median is reported
    top: int = 12  # kernels shown per section
    trace: Path | None = None  # for Perfetto; .gz packs it
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context", "steps", "repeat", "top"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if min(self.image_size) < 1:
            raise ConfigError(f"image_size is {self.image_size}; both sides must be at least 1")
        for name in ("trace", "json"):
            path = getattr(self, name)
            if path is not None and not path.resolve().parent.is_dir():
                raise ConfigError(f"the folder of {path} does not exist; make it first")
