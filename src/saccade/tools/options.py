"""Options of `saccade eval`, `eval-lod`, `eval-quant`, `tune` and `profile`. The command line makes a flag of
every field that has a help text, so this module imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from saccade.config import check_fields, option_field
from saccade.errors import ConfigError

FULL_SET = 200  # questions per task of the fixed set
CURVE_LIMITS = (64, 128, 256, 512, 1024)  # visual tokens; the curve's last point is full detail
QUANT_SCHEMES = "fp8,int8,int4"
LOD_SHARES = (0.125, 0.25, 0.5)  # of full detail's tokens


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions to ask, and where the answers go."""

    tasks: tuple[str, ...] = option_field(
        (), "Only this task (repeat the option).", flag="--task", metavar="NAME"
    )
    count: int = option_field(FULL_SET, "Questions per task of the set.")
    limit: int | None = option_field(None, "Ask only this many of them, spread evenly. [default: all]")
    json: str | None = option_field(None, "Write every answer to FILE; - is stdout.", metavar="FILE")
    max_tokens: int = option_field(64, "Longest answer in tokens.")
    workers: int | None = option_field(
        None, "Processes that draw images. [default: half the cores]", at_least=0
    )
    batch: int = option_field(32, "Questions in the engine at once.")
    progress: bool = option_field(True, "Show a progress bar on stderr.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.limit is not None and self.limit > self.count:
            raise ConfigError(
                f"limit is {self.limit} and the set has {self.count} questions per task; lower --limit or"
                " raise --count"
            )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(QuestionOptions):
    visual_tokens: int | None = option_field(None, "Resize every image to at most this many tokens.")
    curve: bool = option_field(False, "Full detail and 64 to 1024 visual tokens.")
    instruction: str | None = option_field(
        None, "A line added to every question, for models with long answers."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curve and self.visual_tokens is not None:
            raise ConfigError("--curve has its own token limits; leave out --visual-tokens")

    @property
    def levels(self) -> tuple[int | None, ...]:
        """Token limits to ask at; None is full detail."""
        return (*CURVE_LIMITS, None) if self.curve else (self.visual_tokens,)


@dataclass(frozen=True, kw_only=True)
class LodEvalOptions(QuestionOptions):
    shares: tuple[float, ...] = option_field(
        LOD_SHARES, "A budget, as a share of the tokens at full detail (repeat the option).", flag="--share"
    )
    scenes: int | None = option_field(
        None, "Fresh scenes instead of the fixed set, for tuning.", metavar="SEED", at_least=0
    )
    batch: int = option_field(8, "Examples at once; each is asked with every method.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in self.shares:
            if not 0 < share < 1:
                raise ConfigError(f"a share is {share}; it must lie strictly between 0 and 1")

    @property
    def levels(self) -> tuple[float | None, ...]:
        """Shares of full detail; None is the budget of `detail: auto`."""
        return (*self.shares, None)


@dataclass(frozen=True, kw_only=True)
class QuantEvalOptions(QuestionOptions):
    schemes: tuple[str, ...] = option_field(
        (QUANT_SCHEMES,),
        "Schemes with commas between them: what --quantization takes, or folders of quantised checkpoints"
        " (repeat the option).",
        metavar="SCHEMES",
    )
    prompts: int | None = option_field(None, "Text-only prompts. [default: all]")
    limit: int | None = option_field(5, "Questions about images per task, spread evenly over the set.")
    decode_tokens: int = option_field(64, "Tokens decoded to measure speed.", at_least=2)
    repeat: int = option_field(5, "Speed measurements; the fastest is reported.")
    plot: Path | None = option_field(None, "Draw the table (SVG, PNG or PDF); needs matplotlib.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None and not self.plot.resolve().parent.is_dir():
            raise ConfigError(f"the folder of {self.plot} does not exist; make it first")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    budget: float = option_field(300.0, "Search for at most this long.", metavar="SECONDS")
    again: bool = option_field(False, "Search shapes that a table names, too.")
    progress: bool = option_field(True, "Show a progress bar on stderr.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.budget <= 0:
            raise ConfigError(f"budget is {self.budget}; it must be more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    batch: int = option_field(8, "Sequences in a decode step.")
    context: int = option_field(512, "Tokens of each sequence, and of the prompt.")
    image_size: tuple[int, int] = option_field((1024, 1024), "Size of the image.")
    steps: int = option_field(8, "Decode steps in the trace.")
    repeat: int = option_field(3, "Timed runs; the median is reported.")
    top: int = option_field(12, "Kernels shown per section.")
    trace: Path | None = option_field(None, "Write a trace for Perfetto; compressed if the name ends in .gz.")
    json: Path | None = option_field(None, "Write all results as JSON.")

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.image_size) < 1:
            raise ConfigError(f"image_size is {self.image_size}; both sides must be at least 1")
        for path in (self.trace, self.json):
            if path is not None and not path.resolve().parent.is_dir():
                raise ConfigError(f"the folder of {path} does not exist; make it first")
