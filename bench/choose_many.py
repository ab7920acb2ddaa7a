"""From times at 128 and 256 rows to the lines of TUNED and LEFT (kernels/gemm/skinny.py) for them.

Of each product the candidate that was quickest with what follows it stands for election; it is taken where
the layer with it is quicker than the library's layer, and the head, which is in no layer, where it is quicker
itself. Parts of qkv are left to `qk_norm_rope` where that layer is the quickest of the three.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench.candidates import candidates
from bench.many_rows import LAYER, LEFT, LIBRARY
from saccade.kernels.gemm.skinny import SkinnyTuning

Shapes = dict[str, tuple[int, int, bool]]


class Times(Protocol):
    """Of one case: seconds of each variant."""

    @property
    def part(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kernels(self) -> dict[str, float]: ...
    @property
    def others(self) -> dict[str, float]: ...


class ManyLines(NamedTuple):
    tuned: list[str]
    left: list[str]


class Elected(NamedTuple):
    tuning: SkinnyTuning
    ours: float
    library: float
    where: str  # the times are of what

    @property
    def quicker(self) -> bool:
        return self.ours < self.library

    @property
    def figure(self) -> str:
        return f"{self.where} {self.ours * 1e6:.1f} us; the library's {self.library * 1e6:.1f}"


def written(t: SkinnyTuning) -> str:
    lines = f", lines={t.lines}" if t.lines else ""
    ahead = f", ahead={t.ahead}" if t.ahead else ""
    return (
        f'SkinnyTuning({t.columns}, {t.depth}, {t.splits}, {t.warps}, {t.stages}, "{t.mode}"{ahead}{lines})'
    )


def elected(
    product: str, left: bool, alone: Times, layer: Times | None, by_name: dict[str, SkinnyTuning]
) -> Elected | None:
    """None: nothing was measured."""
    times = {name: time for name, time in alone.kernels.items() if name.startswith(LEFT) == left}
    if not times or LIBRARY not in alone.others:
        return None
    best = min(times, key=lambda name: times[name])
    tuning, within = by_name[best.removeprefix(LEFT)], f"{product}: {best}"
    if layer is not None and within in layer.kernels and LIBRARY in layer.others:
        return Elected(tuning, layer.kernels[within], layer.others[LIBRARY], "a layer")
    return Elected(tuning, times[best], alone.others[LIBRARY], "with what follows")


def many_lines(results: Sequence[Times], shapes: Shapes) -> ManyLines | None:
    """None: nothing was measured, so the old lines stay."""
    found = {result.name: result for result in results if result.part == "many"}
    lines = ManyLines([], [])
    for name, alone in found.items():
        product, rows = name.rsplit(" ", 1)
        if product not in shapes:
            continue
        layer = found.get(f"layer {rows}") if product in LAYER else None
        columns, depth, gated = shapes[product]
        by_name = {t.name: t for t in candidates(int(rows), columns, depth, gated)}
        apart = elected(product, False, alone, layer, by_name)
        if apart is not None:
            value = written(apart.tuning) if apart.quicker else "None"
            key = f"({rows}, {columns}, {depth}, {gated})"
            lines.tuned.append(f"    {key}: {value},  # {product}: {apart.figure}")
        left = elected(product, True, alone, layer, by_name)
        if left is not None and left.quicker and (apart is None or left.ours < apart.ours):
            key = f"({rows}, {columns}, {depth})"
            lines.left.append(f"    {key}: {written(left.tuning)},  # {left.figure}")
    return lines if lines.tuned or lines.left else None
