"""Plots are well-formed SVG that show every series with its name."""

import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.plot import PLOTTER, LinePlot, Series, load_plotter
from bench.svg import save_svg
from saccade.errors import ConfigError

SPACE = "{http://www.w3.org/2000/svg}"


def shares(name: str, *values: float, bold: bool = False) -> Series:
    band = tuple((value / 2, value) for value in values) if bold else ()
    return Series(name, tuple((float(step), value) for step, value in enumerate(values)), band, bold=bold)


def plot(*series: Series) -> LinePlot:
    return LinePlot("a < b & c", "sub", "tokens", "right", series, steps=("64", "128", "full"))


def draw(plot: LinePlot, path: Path) -> ElementTree.Element:
    save_svg(plot, path)
    return ElementTree.fromstring(path.read_text())


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SPACE}text")]


def line(root: ElementTree.Element, colour: str) -> list[tuple[float, float]]:
    """Corners of the longest path drawn in a colour: the series itself, not its entry in the legend."""
    paths = [
        path for path in root.iter(f"{SPACE}path") if f"stroke: {colour}" in path.attrib.get("style", "")
    ]
    longest = max((path.attrib["d"].replace("M", "L").split("L")[1:] for path in paths), key=len)
    return [(float(x), float(y)) for x, y in (part.split()[:2] for part in longest)]


def test_every_series_is_drawn_with_a_point_per_step(tmp_path: Path) -> None:
    root = draw(
        plot(shares("reading", 0.1, 0.5, 0.9), shares("overall", 0.05, 0.4, 0.95, bold=True)),
        tmp_path / "p.svg",
    )
    assert len(line(root, "#0072b2")) == len(line(root, "#1f2328")) == 3


def test_higher_is_higher_and_steps_stand_at_equal_distances(tmp_path: Path) -> None:
    places = line(draw(plot(shares("one", 0.0, 0.5, 1.0)), tmp_path / "p.svg"), "#0072b2")
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert places[0][1] > places[2][1]  # SVG counts downwards
    first, second = ((b[0] - a[0]) for a, b in pairwise(places))
    assert first == pytest.approx(second, abs=0.2)


def test_the_legend_names_every_series_with_its_last_value(tmp_path: Path) -> None:
    root = draw(plot(shares("reading", 0.1, 0.5, 0.93), shares("needle", 0.0, 0.2, 0.41)), tmp_path / "p.svg")
    for wanted in ("reading  93%", "needle  41%", "64", "128", "full", "tokens", "right", "a < b & c", "sub"):
        assert wanted in texts(root)


def test_without_steps_both_axes_are_logarithmic(tmp_path: Path) -> None:
    series = (
        Series("step", ((1, 0.5), (32, 5.0), (1024, 50.0))),
        Series("floor <b>", ((1, 0.2), (1024, 20.0)), dashed=True),
    )
    root = draw(LinePlot("t", "s", "sequences", "ms", series), tmp_path / "p.svg")
    places = line(root, "#0072b2")
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert {"step", "floor <b>", "sequences", "ms"} <= set(texts(root))


def test_everything_stands_inside_the_image(tmp_path: Path) -> None:
    root = draw(plot(*(shares(f"series {n}", 0.0, 1.0, n / 12) for n in range(12))), tmp_path / "p.svg")
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    for colour in ("#0072b2", "#8a6d3b"):
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line(root, colour))


def test_the_same_plot_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_svg(plot(shares("one", 0.0, 0.5, 1.0)), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_series_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 steps"):
        plot(shares("short", 0.1, 0.2))


def test_without_matplotlib_the_error_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PLOTTER, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'saccade\[tools\]'"):
        load_plotter()
