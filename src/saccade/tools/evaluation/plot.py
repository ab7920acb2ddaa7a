"""A line plot as SVG: shares in percent over a row of steps. Pure text, no plotting library.

Steps stand at equal distances, which for limits that double is a logarithmic axis. A pale band under a series
is its interval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = 66, 190, 74, 62  # margins; the legend stands in the right one
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, FAINT, GRID = "#1f2328", "#59636e", "#e4e7eb"
# Okabe and Ito's colours, told apart by colour-blind readers; yellow is left out, white paper swallows it.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5fb0", "#8a6d3b")
MARKS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Series:
    name: str
    values: tuple[float, ...]  # 0 to 1, one per step
    band: tuple[tuple[float, float], ...] = ()  # low and high, one per step
    bold: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    subtitle: str
    x_label: str
    y_label: str
    steps: tuple[str, ...]  # labels of the x axis
    series: tuple[Series, ...]


def svg(plot: Plot) -> str:
    """The whole document."""
    for one in plot.series:
        if len(one.values) != len(plot.steps) or (one.band and len(one.band) != len(plot.steps)):
            raise ValueError(f"{one.name} has {len(one.values)} values for {len(plot.steps)} steps")
    body = "\n".join(f"  {line}" for line in _parts(plot))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="{FONT}" role="img">\n'
        f"  <title>{escape(plot.title)}</title>\n{body}\n</svg>\n"
    )


def _parts(plot: Plot) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(LEFT, 30, plot.title, size=17, weight=600)
    yield _text(LEFT, 52, plot.subtitle, size=12.5, fill=FAINT)
    yield from _axes(plot)
    # Bold series last, so that nothing crosses them.
    coloured = _coloured(plot.series)
    for one, colour, mark in sorted(coloured, key=lambda item: item[0].bold):
        yield from _line(plot, one, colour, mark)
    yield from _legend(coloured, plot.steps[-1])


def _coloured(series: Sequence[Series]) -> list[tuple[Series, str, str]]:
    found, plain = [], 0
    for one in series:
        if one.bold:
            found.append((one, INK, "circle"))
        else:
            found.append((one, COLOURS[plain % len(COLOURS)], MARKS[plain % len(MARKS)]))
            plain += 1
    return found


def _x(step: int, steps: int) -> float:
    inner = WIDTH - LEFT - RIGHT
    pad = 26  # between the axis and the first point
    return LEFT + pad + (inner - 2 * pad) * (step / (steps - 1) if steps > 1 else 0.5)


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _axes(plot: Plot) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, _y(0)
    for percent in range(0, 101, 10):
        y = _y(percent / 100)
        strong = percent % 20 == 0
        yield _rule(LEFT, y, right, y, GRID, 1 if strong else 0.5)
        if strong:
            yield _text(LEFT - 9, y + 4, f"{percent}%", size=12, fill=FAINT, anchor="end")
    yield _rule(LEFT, bottom, right, bottom, FAINT, 1)
    for step, label in enumerate(plot.steps):
        x = _x(step, len(plot.steps))
        yield _rule(x, bottom, x, bottom + 5, FAINT, 1)
        yield _text(x, bottom + 20, label, size=12, fill=FAINT, anchor="middle")
    yield _text((LEFT + right) / 2, HEIGHT - 16, plot.x_label, size=13, anchor="middle")
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 18 {middle:.1f})"'
    yield _text(18, middle, plot.y_label, size=13, anchor="middle", extra=turned)


def _line(plot: Plot, one: Series, colour: str, mark: str) -> Iterator[str]:
    places = [(_x(step, len(plot.steps)), _y(value)) for step, value in enumerate(one.values)]
    if one.band:
        upper = [(x, _y(high)) for (x, _), (_, high) in zip(places, one.band, strict=True)]
        lower = [(x, _y(low)) for (x, _), (low, _) in zip(places, one.band, strict=True)]
        yield f'<polygon points="{_points([*upper, *reversed(lower)])}" fill="{colour}" fill-opacity="0.10"/>'
    width = 3 if one.bold else 1.8
    yield (
        f'<polyline points="{_points(places)}" fill="none" stroke="{colour}" stroke-width="{width}"'
        ' stroke-linejoin="round" stroke-linecap="round"/>'
    )
    for (x, y), step, value in zip(places, plot.steps, one.values, strict=True):
        yield _mark(x, y, colour, mark, 4.2 if one.bold else 3.6, f"{one.name}, {step}: {value:.1%}")


def _legend(coloured: Sequence[tuple[Series, str, str]], last: str) -> Iterator[str]:
    """Names beside their lines' colours, best at the last step first, as the eye meets the lines there."""
    ordered = sorted(coloured, key=lambda item: (not item[0].bold, -item[0].values[-1]))
    x = WIDTH - RIGHT + 18
    yield _text(WIDTH - 14, TOP - 12, f"at {last}", size=11, fill=FAINT, anchor="end")
    for row, (one, colour, mark) in enumerate(ordered):
        y = TOP + 8 + row * 25
        width = 3 if one.bold else 1.8
        yield _rule(x, y, x + 26, y, colour, width)
        yield _mark(x + 13, y, colour, mark, 4.2 if one.bold else 3.6, one.name)
        yield _text(x + 34, y + 4.5, one.name, size=13, weight=600 if one.bold else 400)
        yield _text(WIDTH - 14, y + 4.5, f"{one.values[-1]:.0%}", size=12, fill=FAINT, anchor="end")


def _mark(x: float, y: float, colour: str, kind: str, reach: float, told: str) -> str:
    paint = f'fill="{colour}" stroke="#ffffff" stroke-width="1"'
    title = f"<title>{escape(told)}</title>"
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{reach}" {paint}>{title}</circle>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
        "triangle": ((0, -1.3), (1.2, 0.95), (-1.2, 0.95)),
    }[kind]
    path = _points([(x + dx * reach, y + dy * reach) for dx, dy in corners])
    return f'<polygon points="{path}" {paint}>{title}</polygon>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    fill: str = INK,
    anchor: str = "start",
    weight: int = 400,
    extra: str = "",
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {extra}>{escape(text)}</text>'
