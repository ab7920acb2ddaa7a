"""A plot of times over a quantity that doubles, both axes logarithmic, as SVG: text, no plotting library."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 66, 58  # margins; the legend stands in the right one
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, FAINT, GRID = "#1f2328", "#59636e", "#e4e7eb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]  # quantity, milliseconds; both positive
    dashed: bool = False  # a floor


@dataclass(frozen=True)
class Chart:
    title: str
    subtitle: str
    x_label: str
    curves: tuple[Curve, ...]


class _Scale:
    def __init__(self, values: Sequence[float], low: float, high: float, base: float) -> None:
        self._base = base
        self.first = math.floor(math.log(min(values), base) + 1e-9)
        self.last = max(math.ceil(math.log(max(values), base) - 1e-9), self.first + 1)
        self._low, self._high = low, high

    def at(self, value: float) -> float:
        share = (math.log(value, self._base) - self.first) / (self.last - self.first)
        return self._low + share * (self._high - self._low)

    def marks(self) -> list[float]:
        return [self._base**power for power in range(self.first, self.last + 1)]


def svg(chart: Chart) -> str:
    """The whole document."""
    body = "\n".join(f"  {line}" for line in _parts(chart))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="{FONT}" role="img">\n'
        f"  <title>{escape(chart.title)}</title>\n{body}\n</svg>\n"
    )


def _parts(chart: Chart) -> Iterator[str]:
    points = [point for curve in chart.curves for point in curve.points]
    across = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT, 2)
    up = _Scale([y for _, y in points], HEIGHT - BOTTOM, TOP, 10)
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(LEFT, 28, chart.title, 16, INK, "start", 600)
    yield _text(LEFT, 48, chart.subtitle, 12, FAINT)
    for value in up.marks():
        yield _line(LEFT, up.at(value), WIDTH - RIGHT, up.at(value), GRID, 1)
        yield _text(LEFT - 8, up.at(value) + 4, f"{value:g} ms", 11.5, FAINT, "end")
    marks = across.marks()
    for value in marks[:: max(1, len(marks) // 8)]:
        yield _line(across.at(value), HEIGHT - BOTTOM, across.at(value), HEIGHT - BOTTOM + 5, FAINT, 1)
        yield _text(across.at(value), HEIGHT - BOTTOM + 20, f"{value:g}", 11.5, FAINT, "middle")
    yield _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, FAINT, 1)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, chart.x_label, 13, INK, "middle")
    for number, curve in enumerate(chart.curves):
        yield from _curve(curve, number, across, up)


def _curve(curve: Curve, number: int, across: _Scale, up: _Scale) -> Iterator[str]:
    colour = FAINT if curve.dashed else COLOURS[number % len(COLOURS)]
    dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
    path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in curve.points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    for x, y in curve.points if not curve.dashed else ():
        told = escape(f"{curve.name}, {x:g}: {y:.2f} ms")
        place = f'cx="{across.at(x):.1f}" cy="{up.at(y):.1f}"'
        yield f'<circle {place} r="3.4" fill="{colour}"><title>{told}</title></circle>'
    y_legend = TOP + 8 + 22 * number
    yield _line(WIDTH - RIGHT + 14, y_legend, WIDTH - RIGHT + 38, y_legend, colour, 2, dash)
    yield _text(WIDTH - RIGHT + 44, y_legend + 4, curve.name, 12, INK)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, extra: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{extra}/>'


def _text(
    x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: int = 400
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
