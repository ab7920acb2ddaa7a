"""Bar, line and pie charts: values, extremes, labels, colours."""

from __future__ import annotations

import itertools

from . import words
from .documents import grey, paper
from .fonts import text_width
from .scene import COLOUR_NAMES, Box, Scene
from .signs import text_size

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# layouts by split: bars "up" or "across"; where a pie's legend stands
BARS = {"train": ("up", "across"), "eval": ("up",)}
PIES = {"train": ("right", "below"), "eval": ("left", "right")}


def chart_colours(scene: Scene, count: int) -> list[str]:
    return scene.rng.sample([c for c in COLOUR_NAMES if scene.contrasts(c)], count)


def _values(scene: Scene, count: int) -> list[int]:
    """Different values, the extremes clear of the rest."""
    rng = scene.rng
    while True:
        values = rng.sample(range(5, 100), count)
        order = sorted(values)
        if order[-1] - order[-2] >= 6 and order[1] - order[0] >= 6:
            return values


def ask_extremes(
    scene: Scene, task: str, kind: str, labels: list[str], values: list[int], boxes: list[Box]
) -> None:
    rng = scene.rng
    high, low = values.index(max(values)), values.index(min(values))
    tall, short = {
        "bar": ("highest", "lowest"),
        "point": ("highest", "lowest"),
        "slice": ("biggest", "smallest"),
    }[kind]
    scene.ask(
        task,
        rng.choice(
            (
                f"Which {kind} is the {tall}?",
                f"What is the label of the {tall} {kind}?",
                f"Name the {tall} {kind}.",
            )
        ),
        labels[high],
        boxes[high],
        named=True,
    )
    scene.ask(
        task,
        rng.choice(
            (
                f"Which {kind} is the {short}?",
                f"What is the label of the {short} {kind}?",
                f"Name the {short} {kind}.",
            )
        ),
        labels[low],
        boxes[low],
        named=True,
    )
    a, b = rng.sample(range(len(labels)), 2)
    if abs(values[a] - values[b]) >= 6:
        if (values[a] > values[b]) != (rng.random() < 0.5):
            a, b = b, a
        more = "bigger" if kind == "slice" else "higher"
        scene.ask(
            "yes_no",
            f"Is {labels[a]} {more} than {labels[b]}?",
            "yes" if values[a] > values[b] else "no",
            boxes[a],
            named=True,
            also=scene.held.get(boxes[b], (boxes[b],))[:1],
        )


def ask_values(scene: Scene, task: str, labels: list[str], shown: list[str], boxes: list[Box]) -> None:
    rng = scene.rng
    for i in rng.sample(range(len(labels)), min(3, len(labels))):
        question = rng.choice(
            (
                f"What is the value of {labels[i]}?",
                f"How much is {labels[i]}?",
                f"Which value does {labels[i]} have?",
            )
        )
        scene.ask(task, question, shown[i], boxes[i])
    i = rng.randrange(len(labels))
    if shown.count(shown[i]) == 1:
        scene.ask(
            task,
            rng.choice((f"What has the value {shown[i]}?", f"Which label has the value {shown[i]}?")),
            labels[i],
            boxes[i],
            named=True,
        )


def _missing(scene: Scene, labels: list[str]) -> None:
    word = words.distinct(scene.rng, scene.split, 1)[0]
    if word not in labels:
        scene.ask("absent", f"What is the value of {word}?", f"There is no {word}.")


def bars(scene: Scene, level: float) -> None:
    """Bars with labels and values."""
    rng = scene.rng
    ink = paper(scene)
    up = rng.choice(BARS[scene.split]) == "up"
    size = min(text_size(rng, level, high=22.0), scene.width / 13)
    font = scene.font()
    most = int(scene.width * 0.94 / (size * 3.6)) if up else int(scene.height * 0.9 / (size * 1.5))
    count = max(2, min(most, rng.randint(2, 4 if level < 0.3 else 7)))
    labels = words.distinct(rng, scene.split, count) if rng.random() < 0.7 else list(MONTHS[:count])
    if up:  # labels must not run into each other
        slot = scene.width * 0.94 / count
        labels = [_fit(name, font, size, slot * 0.95) for name in labels]
        if len(set(labels)) < count:
            labels = [f"{c}{i}" for i, c in enumerate("ABCDEFG"[:count])]
    values = _values(scene, count)
    colours = chart_colours(scene, count) if rng.random() < 0.6 else chart_colours(scene, 1) * count
    boxes = (
        _bars_up(scene, labels, values, colours, size, font)
        if up
        else _bars_across(scene, labels, values, colours, size, font)
    )
    scene_ink = grey(scene, ink)
    if up:
        scene.line(
            scene.width * 0.02,
            scene.height - size * 1.7,
            scene.width * 0.98,
            scene.height - size * 1.7,
            1.5,
            scene_ink,
        )
    ask_values(scene, "bar_chart", labels, [str(v) for v in values], boxes)
    ask_extremes(scene, "bar_chart", "bar", labels, values, boxes)
    if len(set(colours)) == count:
        i = rng.randrange(count)
        scene.ask(
            "bar_chart",
            rng.choice((f"What colour is the bar {labels[i]}?", f"What color is the bar of {labels[i]}?")),
            colours[i],
            boxes[i],
            named=True,
        )
        scene.ask("bar_chart", f"What is the value of the {colours[i]} bar?", str(values[i]), boxes[i])
    scene.ask("count", "How many bars are there?", str(count))
    _missing(scene, labels)
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        f"This is a bar chart with {count} bars.",
    )


def _fit(name: str, font: int, size: float, wide: float) -> str:
    while len(name) > 2 and text_width(name, font, size) > wide:
        name = name[:-1]
    return name


def _bars_up(
    scene: Scene, labels: list[str], values: list[int], colours: list[str], size: float, font: int
) -> list[Box]:
    ink = (20, 20, 30) if sum(scene.first) > 300 else (240, 240, 240)
    floor, top = scene.height - size * 1.7, size * 1.8
    slot = scene.width * 0.94 / len(labels)
    half = slot * scene.rng.uniform(0.28, 0.42)
    boxes = []
    for i, (label, value, colour) in enumerate(zip(labels, values, colours, strict=True)):
        x = scene.width * 0.03 + (i + 0.5) * slot
        y = floor - (floor - top) * value / 100
        scene.box(x - half, y, x + half, floor, scene.shade(colour))
        said = scene.text(x, y - size * 0.75, size, str(value), font, ink, align="center")
        named = scene.text(x, floor + size * 0.85, size, label, font, ink, align="center")
        whole = (x - slot / 2, y - size * 1.4, x + slot / 2, float(scene.height))
        boxes.append(scene.hold(whole, named, said))
    return boxes


def _bars_across(
    scene: Scene, labels: list[str], values: list[int], colours: list[str], size: float, font: int
) -> list[Box]:
    ink = (20, 20, 30) if sum(scene.first) > 300 else (240, 240, 240)
    left = max(text_width(label, font, size) for label in labels) + size
    right = scene.width - size * 2.2
    slot = scene.height * 0.94 / len(labels)
    half = min(slot * scene.rng.uniform(0.28, 0.42), size * 1.6)
    boxes = []
    for i, (label, value, colour) in enumerate(zip(labels, values, colours, strict=True)):
        y = scene.height * 0.03 + (i + 0.5) * slot
        x = left + (right - left) * value / 100
        scene.box(left, y - half, x, y + half, scene.shade(colour))
        named = scene.text(left - size * 0.4, y, size, label, font, ink, align="right")
        said = scene.text(x + size * 0.4, y, size, str(value), font, ink)
        boxes.append(scene.hold((0.0, y - slot / 2, x + size * 2, y + slot / 2), named, said))
    return boxes


def lines(scene: Scene, level: float) -> None:
    """One line over named steps, values written at the points."""
    rng = scene.rng
    ink = paper(scene)
    size = min(text_size(rng, level, high=22.0), scene.width / 13)
    font = scene.font()
    count = max(3, min(int(scene.width * 0.94 / (size * 3.0)), rng.randint(3, 4 if level < 0.3 else 8)))
    start = rng.randrange(12)
    labels = (
        [MONTHS[(start + i) % 12] for i in range(count)]
        if rng.random() < 0.5
        else [str(2001 + start + i) for i in range(count)]
    )
    values = _values(scene, count)
    if rng.random() < 0.25:
        values.sort(reverse=rng.random() < 0.5)
    colour = chart_colours(scene, 1)[0]
    floor, top, slot = scene.height - size * 1.7, size * 2.4, scene.width * 0.94 / count
    points = [
        (scene.width * 0.03 + (i + 0.5) * slot, floor - (floor - top) * v / 104) for i, v in enumerate(values)
    ]
    scene.line(scene.width * 0.02, floor, scene.width * 0.98, floor, 1.5, grey(scene, ink))
    shade = scene.shade(colour)
    thick = rng.uniform(1.6, 3.5)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        scene.line(x0, y0, x1, y1, thick, shade)
    boxes: list[Box] = []
    for (x, y), label, value in zip(points, labels, values, strict=True):
        scene.box(
            x - thick * 1.4, y - thick * 1.4, x + thick * 1.4, y + thick * 1.4, shade, corner=thick * 1.4
        )
        half = text_width(str(value), font, size) / 2 + 1
        scene.box(
            x - half, y - size * 1.4, x + half, y - size * 0.45, scene.first, opacity=0.85
        )  # the line stays behind the figure
        said = scene.text(x, y - size * 0.9, size, str(value), font, ink, align="center")
        named = scene.text(x, floor + size * 0.85, size, label, font, ink, align="center")
        whole = (x - slot / 2, y - size * 1.6, x + slot / 2, float(scene.height))
        boxes.append(scene.hold(whole, named, said))
    ask_values(scene, "line_chart", labels, [str(v) for v in values], boxes)
    ask_extremes(scene, "line_chart", "point", labels, values, boxes)
    i = rng.randrange(count - 1)
    if abs(values[i + 1] - values[i]) >= 5:
        question = rng.choice(
            (
                f"Does the line go up or down from {labels[i]} to {labels[i + 1]}?",
                f"From {labels[i]} to {labels[i + 1]}, does it rise or fall, up or down?",
            )
        )
        scene.ask("line_chart", question, "up" if values[i + 1] > values[i] else "down", boxes[i])
    scene.ask("line_chart", rng.choice(("What colour is the line?", "What color is the line?")), colour)
    scene.ask("count", "How many points does the line have?", str(count))
    _missing(scene, labels)
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        f"This is a line chart with {count} points.",
    )


def pie(scene: Scene, level: float) -> None:
    """A pie with a legend that names each slice and, mostly, its share."""
    rng = scene.rng
    ink = paper(scene)
    size = min(text_size(rng, level, high=22.0), scene.width / 13)
    font = scene.font()
    count = rng.randint(2, 3 if level < 0.3 else 5)
    labels = [_fit(name, font, size, scene.width * 0.25) for name in words.distinct(rng, scene.split, count)]
    if len(set(labels)) < count:
        labels = list("ABCDEFG"[:count])
    shares = _shares(scene, count)
    colours = chart_colours(scene, count)
    shown = rng.random() < 0.75
    place = rng.choice(PIES[scene.split]) if scene.width >= scene.height * 0.9 else "below"
    line = size * 1.6
    radius, cx, cy, lx, ly = _pie_layout(scene, place, count, line)
    at = rng.randrange(360)
    boxes: list[Box] = []
    for i in range(count):
        stop = (
            at + round(shares[i] * 3.6)
            if i < count - 1
            else at + 360 - sum(round(s * 3.6) for s in shares[:-1])
        )
        shade = scene.shade(colours[i])
        scene.sector(cx, cy, radius, at, stop, shade)
        at = stop
        y = ly + i * line
        scene.box(lx, y - size * 0.4, lx + size * 0.8, y + size * 0.4, shade)
        text = f"{labels[i]} {shares[i]}%" if shown else labels[i]
        boxes.append(scene.text(lx + size * 1.2, y, size, text, font, ink))
    ask_pie(scene, labels, shares, colours, boxes, shown)


def _pie_layout(
    scene: Scene, place: str, count: int, line: float
) -> tuple[float, float, float, float, float]:
    """The pie's radius and middle, and where its legend begins."""
    if place == "below":
        radius = min(scene.width * 0.42, (scene.height - count * line) * 0.45)
        return radius, scene.width / 2, radius * 1.08, scene.width * 0.2, radius * 2.2 + line / 2
    radius = min(scene.width * 0.24, scene.height * 0.44)
    right = place == "right"
    cx = radius * 1.1 if right else scene.width - radius * 1.1
    lx = radius * 2.3 if right else scene.width * 0.02
    return radius, cx, scene.height / 2, lx, max(line, scene.height / 2 - count * line / 2)


def ask_pie(
    scene: Scene, labels: list[str], shares: list[int], colours: list[str], boxes: list[Box], shown: bool
) -> None:
    rng, count = scene.rng, len(labels)
    if shown:
        for i in rng.sample(range(count), min(3, count)):
            name = labels[i]
            question = rng.choice(
                (
                    f"What percent is {name}?",
                    f"What is the share of {name}?",
                    f"How many percent does {name} have?",
                )
            )
            scene.ask("pie_chart", question, f"{shares[i]}%", boxes[i], (str(shares[i]),))
    ask_extremes(scene, "pie_chart", "slice", labels, shares, boxes)
    i = rng.randrange(count)
    name, colour = labels[i], colours[i]
    question = rng.choice((f"What colour is {name}?", f"What color is the slice {name}?"))
    scene.ask("pie_chart", question, colour, boxes[i])
    question = rng.choice(
        (f"What is the label of the {colour} slice?", f"What does the {colour} slice stand for?")
    )
    scene.ask("pie_chart", question, name, boxes[i])
    scene.ask("count", "How many slices does the pie have?", str(count))
    _missing(scene, labels)
    question = rng.choice(("What is in the picture?", "What is this?", "What does the picture show?"))
    scene.ask("describe", question, f"This is a pie chart with {count} slices.")


def _shares(scene: Scene, count: int) -> list[int]:
    """Whole percentages that sum to 100, at least 6 each, the extremes clear of the rest by 5 points."""
    while True:
        cuts = sorted(scene.rng.sample(range(6, 95), count - 1))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        order = sorted(shares)
        if order[0] >= 6 and order[-1] - order[-2] >= 5 and order[1] - order[0] >= 5:
            return shares
