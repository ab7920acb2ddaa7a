"""Line plots of the figures in docs/. Drawing needs matplotlib (the extra `tools`), which GPU machines may
lack, so the module that draws is imported by name."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from saccade.errors import ConfigError

PLOTTER = "bench.svg"


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()  # low and high of each point
    bold: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class LinePlot:
    """With `steps` the x values are indices into its labels and y is a share; without, both axes are
    logarithmic."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    steps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in self.series:
            if self.steps and len(one.points) != len(self.steps):
                raise ValueError(f"{one.name} has {len(one.points)} values for {len(self.steps)} steps")


class Plotter(Protocol):
    def save_svg(self, plot: LinePlot, path: Path) -> None: ...


def load_plotter() -> Plotter:
    try:
        return cast(Plotter, import_module(PLOTTER))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plots need {error.name}; install it with: pip install 'saccade[tools]'"
        ) from error
