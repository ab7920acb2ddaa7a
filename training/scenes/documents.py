"""Scenes of paper: key-value forms, receipts, tables and pages of small print."""

from __future__ import annotations

from saccade.tools.evaluation.renderer import Colour

from . import words
from .fonts import text_width
from .scene import Box, Scene, around
from .signs import ink_on, text_size

# layouts by split: (separator after the key, alignment of values, frame)
FORMS = {
    "train": (
        (":", "left", "none"),
        (":", "right", "none"),
        ("", "left", "lines"),
        (":", "left", "boxes"),
        ("", "right", "lines"),
        (" -", "left", "none"),
        (" =", "left", "none"),
    ),
    "eval": ((":", "left", "lines"), ("", "left", "boxes"), (":", "right", "lines")),
}
RECEIPTS = {
    "train": (("center", True), ("left", False), ("left", True)),
    "eval": (("center", False), ("right", True)),
}
TABLES = {"train": ("lines", "stripes", "none"), "eval": ("grid", "header")}


def paper(scene: Scene) -> Colour:
    """A light page with a little grain; gives the ink."""
    scene.background(dark=0.08, grain=6)
    return ink_on(scene.rng, scene.first)


def value(scene: Scene, key: str) -> str:
    """Something that may stand beside a key."""
    rng, split = scene.rng, scene.split
    if key == "Date":
        return words.date(rng)
    if key in ("Name", "Owner", "Driver", "Doctor", "Manager", "Client"):
        return words.name(rng, split)
    if key in ("City", "Origin", "Country", "Branch"):
        return words.place(rng, split)
    draw = rng.random()
    return (
        words.code(rng, split)
        if draw < 0.35
        else words.number(rng, split)
        if draw < 0.7
        else words.price(rng)
        if draw < 0.8
        else words.word(rng, split)
    )


def grey(scene: Scene, ink: Colour) -> Colour:
    """Half way between ink and ground, for rules."""
    return ((ink[0] + scene.first[0]) // 2, (ink[1] + scene.first[1]) // 2, (ink[2] + scene.first[2]) // 2)


def ask_key(scene: Scene, task: str, key: str, text: str, box: Box) -> None:
    rng = scene.rng
    asked = key if rng.random() < 0.7 else key.lower()
    question = rng.choice(
        (
            f"What is the {asked}?",
            f"What does it say for {asked}?",
            f"Read the {asked}.",
            f"What is written next to {asked}?",
            f"Give the {asked}.",
        )
    )
    scene.ask(task, question, text, box)


def form(scene: Scene, level: float) -> None:
    """Rows of key and value."""
    rng = scene.rng
    ink = paper(scene)
    separator, align, frame = rng.choice(FORMS[scene.split])
    size = min(text_size(rng, level, high=28.0), scene.width / 9)
    font, bold = scene.font(), scene.font()
    step = size * rng.uniform(1.5, 2.1)
    top = step * 0.8
    if scene.height > step * 4 and rng.random() < 0.6:
        scene.text(scene.width / 2, top, size * 1.15, words.word(rng, scene.split), bold, ink, align="center")
        top += step * 1.2
    rows = max(1, min(int((scene.height - top) / step), rng.randint(2, 4 if level < 0.3 else 9)))
    if rng.random() < 0.6:
        keys = rng.sample(words.KEYS, rows + 1)
    else:
        keys = words.distinct(rng, scene.split, rows + 1)
    missing = keys.pop()
    left, right = scene.width * rng.uniform(0.04, 0.1), scene.width * rng.uniform(0.9, 0.96)
    column = max(
        left + max(text_width(k + separator, font, size) for k in keys) + size,
        scene.width * rng.uniform(0.35, 0.45),
    )
    pairs: list[tuple[str, str, Box]] = []
    for i, key in enumerate(keys):
        y = top + (i + 0.5) * step
        text = value(scene, key)
        if column + text_width(text, font, size) > right:
            text = str(rng.randint(10, 999))
        if frame == "lines":
            scene.line(left, y + step / 2, right, y + step / 2, 1.0, grey(scene, ink))
        elif frame == "boxes":
            scene.box(column - size * 0.3, y - step * 0.42, right + 2, y + step * 0.42, grey(scene, ink))
            scene.box(
                column - size * 0.3 + 1, y - step * 0.42 + 1, right + 1, y + step * 0.42 - 1, scene.first
            )
        named = scene.text(left, y, size, key + separator, font, ink)
        x = column if align == "left" else right
        said = scene.text(x, y, size, text, font, ink, align=align)
        pairs.append((key, text, scene.hold(around(named, said), named, said)))
    ask_form(scene, pairs, missing)


def ask_form(scene: Scene, pairs: list[tuple[str, str, Box]], missing: str) -> None:
    rng = scene.rng
    for key, text, box in rng.sample(pairs, min(5, len(pairs))):
        ask_key(scene, "form", key, text, box)
    values = [p[1] for p in pairs]
    key, text, box = rng.choice(pairs)
    if values.count(text) == 1:
        scene.ask(
            "form",
            rng.choice((f'Which field says "{text}"?', f'What has the value "{text}"?')),
            key,
            box,
            named=True,
        )
    key, text, box = rng.choice(pairs)
    yes = rng.random() < 0.5
    shown = text if yes else rng.choice([v for v in values if v != text] or [value(scene, "Order")])
    if yes or shown != text:
        scene.ask("yes_no", f'Is the {key} "{shown}"?', "yes" if yes else "no", box)
    scene.ask(
        "absent", rng.choice((f"What is the {missing}?", f"Read the {missing}.")), f"There is no {missing}."
    )
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        f"This is a form with {len(pairs)} rows.",
    )


def receipt(scene: Scene, level: float) -> None:
    """Shop, date, items with prices, a total."""
    rng = scene.rng
    ink = paper(scene)
    align, dotted = rng.choice(RECEIPTS[scene.split])
    size = min(text_size(rng, level, high=24.0), scene.width / 11)
    font = scene.font()
    step = size * rng.uniform(1.3, 1.7)
    wide = min(scene.width * 0.92, size * rng.uniform(15, 22))
    left = (
        (scene.width - wide) / 2
        if rng.random() < 0.5
        else rng.uniform(0.03 * scene.width, scene.width - wide - 0.03 * scene.width)
    )
    right = left + wide
    if rng.random() < 0.5:
        scene.box(left - size * 0.4, 2, right + size * 0.4, scene.height - 2, (252, 252, 250))
        ink = (30, 30, 35)
    shop = words.word(rng, scene.split)
    x = {"left": left, "center": (left + right) / 2, "right": right}[align]
    y = step
    shop_box = scene.text(x, y, size * 1.2, shop, scene.font(), ink, align=align)
    y += step * 1.2
    date = words.date(rng)
    date_box = scene.text(left, y, size, "Date " + date, font, ink)
    y += step * 1.2
    room = int((scene.height - y - 3.2 * step) / step)
    count = max(1, min(room, rng.randint(2, 3 if level < 0.3 else 8)))
    items: list[tuple[str, str, Box]] = []
    total = 0
    missing, *names = words.distinct(rng, scene.split, count + 1, rng.choice(("capital", "lower", "upper")))
    for item in names:
        price = words.price(rng)
        total += round(float(price) * 100)
        items.append((item, price, _priced(scene, left, right, y, size, font, ink, item, price, dotted)))
        y += step
    scene.line(left, y - step * 0.35, right, y - step * 0.35, 1.2, ink)
    lines = _sums(scene, (left, right), y, (size, step), font, ink, total)
    ask_receipt(scene, items, lines, missing)
    question = rng.choice(("What is the date?", "Which date is on the receipt?", "Read the date."))
    scene.ask("receipt", question, date, date_box)
    question = rng.choice(("What is the name of the shop?", "Which shop is it?", "Name the shop."))
    scene.ask("receipt", question, shop, shop_box)


def _sums(
    scene: Scene,
    sides: tuple[float, float],
    y: float,
    scale: tuple[float, float],
    font: int,
    ink: Colour,
    cents: int,
) -> list[tuple[str, str, Box]]:
    """Subtotal and tax where there is room, and the total; `scale` is text size and line step."""
    rng, (left, right), (size, step) = scene.rng, sides, scale
    lines: list[tuple[str, str, Box]] = []
    if scene.height - y > 3 * step and rng.random() < 0.6:
        tax = max(1, cents * rng.choice((5, 8, 10, 20)) // 100)
        for key, amount in (("Subtotal", cents), ("Tax", tax)):
            shown = f"{amount / 100:.2f}"
            box = _priced(scene, left, right, y + step * 0.3, size, font, ink, key, shown, False)
            lines.append((key, shown, box))
            y += step
        cents += tax
    shown = f"{cents / 100:.2f}"
    box = _priced(scene, left, right, y + step * 0.4, size * 1.05, font, ink, "Total", shown, False)
    return [*lines, ("Total", shown, box)]


def _priced(
    scene: Scene,
    left: float,
    right: float,
    y: float,
    size: float,
    font: int,
    ink: Colour,
    item: str,
    price: str,
    dotted: bool,
) -> Box:
    named = scene.text(left, y, size, item, font, ink)
    end = named[2]
    box = scene.text(right, y, size, price, font, ink, align="right")
    if dotted and box[0] - end > size:
        dot = text_width(".", font, size)
        scene.text(end + size * 0.2, y, size, "." * int((box[0] - end - size * 0.5) / dot), font, ink)
    return scene.hold(around(named, box), named, box)


def ask_receipt(
    scene: Scene, items: list[tuple[str, str, Box]], lines: list[tuple[str, str, Box]], missing: str
) -> None:
    rng = scene.rng
    for key, text, box in lines:
        name = key.lower()
        questions = {
            "total": (
                "What is the total?",
                "How much is the total?",
                "What is the total amount?",
                "How much was paid?",
            ),
            "tax": ("What is the tax?", "How much is the tax?"),
            "subtotal": ("What is the subtotal?", "How much is the subtotal?"),
        }
        scene.ask("receipt", rng.choice(questions[name]), text, box)
    for item, price, box in rng.sample(items, min(3, len(items))):
        question = rng.choice(
            (f"How much is the {item}?", f"What is the price of {item}?", f"What does {item} cost?")
        )
        scene.ask("receipt", question, price, box)
    prices = [p for _, p, _ in items]
    item, price, box = rng.choice(items)
    if prices.count(price) == 1:
        scene.ask(
            "receipt",
            rng.choice((f"Which item costs {price}?", f"What costs {price}?")),
            item,
            box,
            named=True,
        )
    scene.ask("count", "How many items are on the receipt?", str(len(items)))
    scene.ask(
        "absent",
        rng.choice((f"How much is the {missing}?", f"What does {missing} cost?")),
        f"There is no {missing}.",
    )
    yes = rng.random() < 0.5
    scene.ask(
        "yes_no",
        f"Is {item if yes else missing} on the receipt?",
        "yes" if yes else "no",
        box if yes else None,
    )
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        f"This is a receipt with {len(items)} items.",
    )


def table(scene: Scene, level: float) -> None:
    """Named rows and columns of values."""
    rng = scene.rng
    ink = paper(scene)
    style = rng.choice(TABLES[scene.split])
    size = min(text_size(rng, level, high=24.0), scene.width / 13)
    font, bold = scene.font(), scene.font()
    step = size * rng.uniform(1.5, 2.0)
    columns = max(1, min(int(scene.width * 0.95 / (size * 4.6)) - 1, rng.randint(1, 2 if level < 0.3 else 4)))
    rows = max(2, min(int((scene.height - step) / step) - 1, rng.randint(2, 4 if level < 0.3 else 8)))
    heads = (
        rng.sample(words.KEYS, columns) if rng.random() < 0.5 else words.distinct(rng, scene.split, columns)
    )
    names = words.distinct(rng, scene.split, rows)
    left, right = scene.width * 0.03, scene.width * 0.97
    wide = (right - left) / (columns + 1)
    top = step * rng.uniform(0.6, 1.0)
    if style in ("stripes", "header"):
        for i in range(0, rows + 1, 2) if style == "stripes" else (0,):
            scene.box(left, top + i * step - step / 2, right, top + i * step + step / 2, _tint(scene))
    if style in ("lines", "grid"):
        for i in range(rows + 2):
            scene.line(left, top + (i - 0.5) * step, right, top + (i - 0.5) * step, 1.0, grey(scene, ink))
    if style == "grid":
        for j in range(columns + 2):
            scene.line(
                left + j * wide,
                top - step / 2,
                left + j * wide,
                top + (rows + 0.5) * step,
                1.0,
                grey(scene, ink),
            )
    tops = [scene.text(left + (j + 1.08) * wide, top, size, head, bold, ink) for j, head in enumerate(heads)]
    cells: dict[tuple[int, int], tuple[str, Box]] = {}
    for i, name in enumerate(names):
        y = top + (i + 1) * step
        named = scene.text(left + wide * 0.08, y, size, name, font, ink)
        for j in range(columns):
            text = rng.choice(
                (words.price(rng), str(rng.randint(1, 999)), words.number(rng, scene.split)[:5].rstrip(".,:"))
            )
            box = scene.text(left + (j + 1.08) * wide, y, size, text, font, ink)
            cells[i, j] = (text, scene.hold(around(named, box), named, box))
    ask_table(scene, heads, names, cells, tops)


def _tint(scene: Scene) -> Colour:
    r, g, b = scene.first
    return (max(0, r - 22), max(0, g - 22), max(0, b - 14)) if r + g + b > 300 else (r + 25, g + 25, b + 30)


def ask_table(
    scene: Scene,
    heads: list[str],
    names: list[str],
    cells: dict[tuple[int, int], tuple[str, Box]],
    tops: list[Box],
) -> None:
    rng = scene.rng
    for i, j in rng.sample(sorted(cells), min(5, len(cells))):
        text, box = cells[i, j]
        question = rng.choice(
            (
                f"What is the {heads[j]} of {names[i]}?",
                f"Which {heads[j]} does {names[i]} have?",
                f"Read the {heads[j]} in the row {names[i]}.",
            )
        )
        scene.ask("table", question, text, box, also=(tops[j],))
    for _ in range(2):
        i, j = rng.randrange(len(names)), rng.randrange(len(heads))
        text, box = cells[i, j]
        if sum(cells[k, j][0] == text for k in range(len(names))) == 1:
            scene.ask(
                "table",
                rng.choice((f"Which row has {heads[j]} {text}?", f"Whose {heads[j]} is {text}?")),
                names[i],
                box,
                named=True,
                also=(tops[j],),
            )
    scene.ask("count", "How many rows are in the table?", str(len(names)))
    missing = words.distinct(rng, scene.split, 1)[0]
    if missing not in names:
        scene.ask("absent", f"What is the {heads[0]} of {missing}?", f"There is no {missing}.")
        yes = rng.random() < 0.5
        scene.ask(
            "yes_no", f"Is {rng.choice(names) if yes else missing} in the table?", "yes" if yes else "no"
        )
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        f"This is a table with {len(names)} rows.",
    )
