"""The plot is well-formed SVG that shows every series where its values are."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from saccade.tools.evaluation.plot import HEIGHT, WIDTH, Plot, Series, svg

SPACE = "{http://www.w3.org/2000/svg}"


def plot(*series: Series) -> Plot:
    return Plot("a < b & c", "sub", "tokens", "right", ("64", "128", "full"), series)


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def drawn(*series: Series) -> ElementTree.Element:
    return ElementTree.fromstring(svg(plot(*series)))


def test_one_polyline_per_series_with_a_point_per_step() -> None:
    root = drawn(
        Series("reading", (0.1, 0.5, 0.9)),
        Series("needle", (0.0, 0.2, 1.0)),
        Series("overall", (0.05, 0.4, 0.95), ((0.0, 0.1), (0.3, 0.5), (0.9, 1.0)), bold=True),
    )
    lines = root.findall(f"{SPACE}polyline")
    assert len(lines) == 3
    assert {line.attrib["stroke"] for line in lines} == {"#0072b2", "#d55e00", "#1f2328"}
    for line in lines:
        assert len(points(line)) == 3
    assert root.find(f"{SPACE}title").text == "a < b & c"  # type: ignore[union-attr]


def test_higher_is_higher_and_steps_stand_at_equal_distances() -> None:
    (line,) = drawn(Series("one", (0.0, 0.5, 1.0))).findall(f"{SPACE}polyline")
    places = points(line)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert places[0][1] > places[2][1]  # SVG counts downwards
    first, second = ((b[0] - a[0]) for a, b in pairwise(places))
    assert first == pytest.approx(second, abs=0.2)


def test_everything_stands_inside_the_picture() -> None:
    root = drawn(*(Series(f"series {n}", (0.0, 1.0, n / 12)) for n in range(12)))
    for element in root.iter():
        at = {name: float(element.attrib[name]) for name in ("x", "y", "cx", "cy") if name in element.attrib}
        assert all(0 <= at.get(name, 0) <= WIDTH for name in ("x", "cx"))
        assert all(0 <= at.get(name, 0) <= HEIGHT for name in ("y", "cy"))


def test_the_legend_names_every_series_with_its_last_value() -> None:
    root = drawn(Series("reading", (0.1, 0.5, 0.93)), Series("needle", (0.0, 0.2, 0.41)))
    texts = [element.text for element in root.iter(f"{SPACE}text")]
    for wanted in ("reading", "needle", "93%", "41%", "64", "128", "full", "tokens", "right"):
        assert wanted in texts


def test_a_series_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 steps"):
        svg(plot(Series("short", (0.1, 0.2))))
