"""Options of `saccade eval` and `saccade eval-lod`. The command line imports this module, so it imports no
torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import ConfigError

Peer = Literal["transformers"]

FULL_SET = 200  # questions per task of the fixed set
CURVE_LIMITS = (64, 128, 256, 512, 1024)  # visual tokens; the curve's last point is full detail
CURVE_FOLDER = Path("docs/quality")
LOD_SHARES = (0.125, 0.25, 0.5)  # of full detail's tokens


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions to ask, and where the answers go."""

    tasks: tuple[str, ...] = ()  # none: all, in the set's order
    count: int = FULL_SET  # questions per task of the set
    limit: int | None = None  # ask only so many of them per task, spread evenly over the set
    out: Path | None = None  # folder of the page, the plot and the answers
    json: str | None = None  # a file, or - for stdout (the table then goes to stderr)
    max_tokens: int = 64  # longest answer
    workers: int | None = None  # processes that draw; 0: this one only; None: half the cores, at most 8
    progress: bool = True

    def check(self, **least: int) -> None:
        limits = {"count": 1, "limit": 1, "batch": 1, "max_tokens": 1, "workers": 0, **least}
        for field, low in limits.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ConfigError(f"{field} is {value}; it must be at least {low}")
        if self.limit is not None and self.limit > self.count:
            raise ConfigError(
                f"limit is {self.limit} and the set has {self.count} questions per task; lower --limit or"
                " raise --count"
            )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(QuestionOptions):
    visual_tokens: int | None = None  # most an image may cost; None: what the checkpoint's processor gives
    curve: bool = False  # full detail and every limit of CURVE_LIMITS; written to `out` or CURVE_FOLDER
    peer: Peer | None = None  # ask it the same questions and compare the tokens
    batch: int = 32  # images held, and requests in the engine, at once
    instruction: str | None = None  # a line after every question, for verbose models

    def __post_init__(self) -> None:
        self.check(visual_tokens=1)
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


@dataclass(frozen=True, kw_only=True)
class LodEvalOptions(QuestionOptions):
    shares: tuple[float, ...] = LOD_SHARES  # budgets; `auto` is added
    ablate: bool = False  # compare the stages instead of the methods
    scenes: int | None = None  # seed of fresh scenes, for tuning; None: the fixed set
    batch: int = 8  # examples held at once; each is asked with every method

    def __post_init__(self) -> None:
        self.check()
        for share in self.shares:
            if not 0 < share < 1:
                raise ConfigError(f"a share is {share}; it must lie strictly between 0 and 1")

    @property
    def levels(self) -> tuple[float | None, ...]:
        """Shares of full detail; None is the budget of `detail: auto`."""
        return (*self.shares, None)
