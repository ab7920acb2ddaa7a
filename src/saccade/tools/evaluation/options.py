"""What to evaluate and how much of it; checked once. No torch: the command line imports this for its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import ConfigError

Peer = Literal["transformers"]

FULL_SET = 200  # questions per task of the fixed set
CURVE_LIMITS = (64, 128, 256, 512, 1024)  # visual tokens; the curve's last point is full detail
CURVE_FOLDER = Path("docs/quality")


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    tasks: tuple[str, ...] = ()  # none: all, in the set's order
    count: int = FULL_SET  # questions per task of the set
    limit: int | None = None  # ask only so many of them per task, spread evenly over the set
    visual_tokens: int | None = None  # most a picture may cost; None: what the checkpoint makes of it
    curve: bool = False  # full detail and every limit of CURVE_LIMITS
    out: Path | None = None  # the curve's folder; None: CURVE_FOLDER
    peer: Peer | None = None  # ask it the same questions and compare the tokens
    json: str | None = None  # a file, or - for stdout (the table then goes to stderr)
    batch: int = 32  # pictures held, and requests in the engine, at once
    max_tokens: int = 64  # longest answer
    instruction: str | None = None  # a line after every question, for checkpoints that like to talk
    workers: int | None = None  # processes that draw; 0: none but this one; None: half the cores, 8 at most
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"count": 1, "limit": 1, "visual_tokens": 1, "batch": 1, "max_tokens": 1, "workers": 0}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ConfigError(f"{field} is {value}; it must be at least {low}")
        if self.limit is not None and self.limit > self.count:
            raise ConfigError(
                f"limit is {self.limit} and the set has {self.count} questions per task; lower --limit or"
                " raise --count"
            )
        if self.curve and self.visual_tokens is not None:
            raise ConfigError("--curve has its own token limits; leave out --visual-tokens")
        if self.curve and self.peer is not None:
            raise ConfigError("--peer compares one level of detail; leave out --curve")
        if self.out is not None and not self.curve:
            raise ConfigError("--out is where the curve goes; add --curve, or use --json for the answers")

    @property
    def levels(self) -> tuple[int | None, ...]:
        """Token limits to ask at; None is full detail."""
        return (*CURVE_LIMITS, None) if self.curve else (self.visual_tokens,)


LOD_SHARES = (0.125, 0.25, 0.5)  # of the tokens of full detail


@dataclass(frozen=True, kw_only=True)
class LodEvalOptions:
    """`saccade eval-lod`: ways to spend visual tokens, side by side."""

    tasks: tuple[str, ...] = ()  # none: all, in the set's order
    count: int = FULL_SET  # questions per task of the set
    limit: int | None = None  # ask only so many of them per task, spread evenly over the set
    shares: tuple[float, ...] = LOD_SHARES  # budgets; `auto` comes after them
    ablate: bool = False  # what each stage is worth, instead of the methods
    scenes: int | None = None  # fresh scenes by this seed, for tuning; None: the fixed set
    out: Path | None = None  # folder of the page, the plot and the answers; None: they are not written
    json: str | None = None  # a file, or - for stdout (the table then goes to stderr)
    batch: int = 8  # examples held at once; each is asked in every way
    max_tokens: int = 64
    workers: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"count": 1, "limit": 1, "batch": 1, "max_tokens": 1, "workers": 0}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ConfigError(f"{field} is {value}; it must be at least {low}")
        if self.limit is not None and self.limit > self.count:
            raise ConfigError(
                f"limit is {self.limit} and the set has {self.count} questions per task; lower --limit or"
                " raise --count"
            )
        for share in self.shares:
            if not 0 < share < 1:
                raise ConfigError(f"a share is {share}; it must lie between 0 and 1, both left out")

    @property
    def levels(self) -> tuple[float | None, ...]:
        """Shares of full detail; None is what `detail: auto` spends."""
        return (*self.shares, None)
