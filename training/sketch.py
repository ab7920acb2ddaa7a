"""What a batch with views holds: a source, a budget, and the grid of its zoomed views. No torch here.

The grid is one that the engine might choose: a scene is sketched, a question of it asked, and one of the
windows it would get gives the grid of all. So grids come as often as they do there."""

from __future__ import annotations

from random import Random

from .data import Spec
from .scenes.generate import SIDES, make_scene, pack
from .scenes.words import TRAIN
from .views import SHARES, SOURCES, UNIT, Chooser, a_price, first_look, ink

SMALL = (224, 672)  # shortest and longest side of kinds that have no sides of their own

RARE = 0.1  # of batches: any grid that is possible, also those that are hardly ever chosen


def fitting(kinds: dict[str, float], width: int, height: int) -> dict[str, float]:
    """The kinds of scene that come in such a size."""
    found = {}
    for kind, weight in kinds.items():
        low, high = SIDES.get(kind, SMALL)
        if low <= min(width, height) and max(width, height) <= high + UNIT:
            found[kind] = weight
    return found


def plan_views(
    patches: int,
    level: float,
    kinds: dict[str, float],
    rng: Random,
    toy: bool,
    shares: dict[float | None, float] = SHARES,
) -> Spec:
    """A batch of sources seen as a small global view and zoomed views of one grid."""
    while True:
        width, height = rng.choice(SOURCES)
        share = rng.choices(list(shares), list(shares.values()))[0]
        look, left = first_look(width, height, share)
        some = fitting(kinds, width, height)
        chooser = Chooser(width, height, look, left)
        if not some or not chooser.windows:
            continue
        kind = rng.choices(list(some), list(some.values()))[0]
        scene = make_scene(kind, TRAIN, width, height, min(1.0, level), rng.getrandbits(62))
        marks = pack([scene])
        fine = ink(marks.rows[0, :, 1], marks.rows[0, :, 2], width, height, look)
        asks = [ask for ask in scene.asks if ask.parts]
        if not asks:
            continue
        regions = chooser.free(chooser.field(rng.choice(asks), fine, rng), a_price(rng))
        if not regions:
            continue
        grids = [one.grid for one in regions]
        if rng.random() < RARE:
            grids = [one.grid for one in chooser.windows]
        rows, columns = rng.choice(grids)
        per = rows * columns
        crops, asked = (8, 9) if per < 40 else (5, 7) if per < 100 else (3, 5)
        one = look[0] * look[1] * 4 + crops * per * 4
        batch = 4 if toy else max(8, min(256, patches // one) // 8 * 8)
        text = -(-(asked * 30 + asked * (per + 2)) // 64) * 64
        return Spec(
            width,
            height,
            batch,
            text,
            level,
            some,
            True,
            (look[1] * UNIT, look[0] * UNIT),
            (columns * UNIT, rows * UNIT),
            crops,
            left,
        )
