"""What a measurement is made of, and the little mathematics on it. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["lower", "higher"]
Parameters = Mapping[str, float | int | str]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of them lie, linear between neighbours as numpy does it."""
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"a percentile is a share of 0 to 1, not {share}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of the table, with everything it was made from."""

    workload: str
    metric: str
    unit: str
    value: float
    better: Better = "lower"
    samples: tuple[float, ...] = ()  # in the unit, in the order they were taken
    parameters: Parameters = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.workload} {self.metric} came out as {self.value}")


def median_row(
    workload: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    *,
    better: Better = "lower",
    parameters: Parameters | None = None,
    note: str = "",
) -> Row:
    return Row(
        workload=workload,
        metric=metric,
        unit=unit,
        value=median(samples),
        better=better,
        samples=tuple(samples),
        parameters=parameters or {},
        note=note,
    )
