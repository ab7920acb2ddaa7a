"""From measured times to the lines that make them the default: `python -m bench.kernels --choose [--write]`.

takes   the times of every case, and which parts were wrong
gives   lines for CHOICE (kernels/dispatch.py), TUNED, LEFT and AHEAD (kernels/gemm/skinny.py), LAST_ROWS
        (kernels/attention/decode.py); with --write, those files, where something was measured

A kernel is chosen when its checks passed and it beats the reference (or the library): the geometric mean of
the ratios above 1, its best variant against the first of the others. A product is tuned by rows up to 1, 16,
32 and 64; where the library wins, the line says None and the library runs. How the lines for 128 and 256 rows
come about is in `choose_many`; either kind of lines is left as it is when the other is written. Checks try
every tile, not every way to cut it; `bench.kernels --check --parts chosen` tries what was written.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from bench.candidates import CANDIDATES
from bench.choose_many import ManyLines, many_lines, written
from saccade.kernels import dispatch as choice
from saccade.kernels.attention import decode as paged_decode
from saccade.kernels.attention.decode import SHORT, DecodeTuning, default_splits
from saccade.kernels.gemm import skinny


class Result(NamedTuple):
    """Of one case: seconds of each variant."""

    part: str
    name: str
    kernels: dict[str, float]
    others: dict[str, float]  # the reference or the library first


# Which cases speak for which kernel: the part, and how the case's name begins.
CASES: dict[str, tuple[str, str]] = {
    "decode_attention": ("decode", ""),
    "prefill_attention": ("prefill", ""),
    "qk_norm_rope": ("finish", ""),
    "rotary_angles": ("points", "angles"),
    "rotary": ("points", "ViT rotation"),
    "add_norm": ("points", "add + rms norm"),
    "silu_mul": ("points", "silu * up"),
    "skinny_linear": ("products", ""),
    "argmax": ("sample", "greedy"),
    "draw": ("sample", "top-p"),
    "device_rows": ("points", "device rows"),
    "copy_block": ("points", "copy of a block"),
    "texture": ("pixels", "texture of"),
}
AHEADS = {"plain": 0, "pdl": 0, "pdl, 512 ahead": 512, "pdl, 2048 ahead": 2048}
WITHOUT = "pdl, 512 ahead"  # the way to launch a layer that others are measured against
KV_HEADS, CHUNK = 8, DecodeTuning().chunk
LIMITS = (1, 16, 32, 64)  # more rows: `choose_many`
NOT_COMPARED = "not compared"


def verdict(ratios: list[float]) -> tuple[str, str]:
    """The choice, and the figure that stands behind it."""
    if not ratios:
        return choice.TORCH, NOT_COMPARED
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    figure = f"{mean:.2f}x the reference over {len(ratios)} cases, {min(ratios):.2f} to {max(ratios):.2f}"
    return (choice.KERNEL if mean > 1 else choice.TORCH), figure


def ratios(results: Iterable[Result], part: str, begins: str) -> list[float]:
    return [
        next(iter(found.others.values())) / min(found.kernels.values())
        for found in results
        if found.part == part and found.name.startswith(begins) and found.kernels and found.others
    ]


def choices(results: list[Result], failed: set[str]) -> dict[str, tuple[str, str]]:
    """By the name of the kernel: the choice and why."""
    made = {}
    for name, (part, begins) in CASES.items():
        wrong = part in failed
        made[name] = (choice.TORCH, "wrong on this chip") if wrong else verdict(ratios(results, part, begins))
    return made


def choice_lines(results: list[Result], failed: set[str], chip: str) -> list[str]:
    """As they stand in kernels/dispatch.py."""
    constant = {choice.TORCH: "TORCH", choice.KERNEL: "KERNEL"}
    return [
        f'    "{name}": {constant[chosen]},  # {chip}: {why}'
        for name, (chosen, why) in choices(results, failed).items()
    ]


def tuned_lines(results: list[Result], shapes: dict[str, tuple[int, int, bool]]) -> list[str]:
    """Lines of TUNED in kernels/gemm/skinny.py; `shapes`: columns, depth and gated of each product."""
    lines = []
    by_name = {tuning.name: tuning for tuning in CANDIDATES}
    for found in results:
        if found.part != "products" or not found.kernels or not found.others:
            continue
        product, rows = found.name.rsplit(" ", 1)
        limit = next(limit for limit in LIMITS if int(rows) <= limit)
        columns, depth, gated = shapes[product]
        best = min(found.kernels, key=lambda name: found.kernels[name])
        ratio = next(iter(found.others.values())) / found.kernels[best]
        nbytes = 2 * columns * (2 if gated else 1) * depth
        value = written(by_name[best])
        figure = f"{product}: {nbytes / found.kernels[best] / 1e12:.2f} TB/s, {ratio:.2f}x cuBLAS"
        if ratio <= 1:
            value = "None"
        lines.append(f"    ({limit}, {columns}, {depth}, {gated}): {value},  # {figure}")
    return lines


def left_lines(results: list[Result], shapes: dict[str, tuple[int, int, bool]]) -> list[str]:
    """Lines of LEFT in kernels/gemm/skinny.py: where `qk_norm_rope` adds up the partial products of qkv."""
    lines = []
    by_name = {tuning.name: tuning for tuning in CANDIDATES}
    columns, depth, _ = shapes["qkv"]
    for found in results:
        if found.part != "qkv" or not found.kernels or not found.others:
            continue
        limit = next(limit for limit in LIMITS if int(found.name.split()[0]) <= limit)
        best = min(found.kernels, key=lambda name: found.kernels[name])
        now = next(iter(found.others.values()))
        if found.kernels[best] < now:
            figure = f"{found.kernels[best] * 1e6:.1f} us with qk_norm_rope; apart {now * 1e6:.1f}"
            lines.append(f"    ({limit}, {columns}, {depth}): {written(by_name[best])},  # {figure}")
    return lines


def ahead_line(results: list[Result]) -> str | None:
    """How far a product looks ahead: the best over the layer's cases, by the sum of their times."""
    found = [one.kernels for one in results if one.part == "layer" and set(AHEADS) <= set(one.kernels)]
    if not found:
        return None
    sums = {name: sum(times[name] for times in found) for name in AHEADS if name != "plain"}
    best = min(sums, key=lambda name: sums[name])
    plain = sum(times["plain"] for times in found)
    return f"AHEAD = {AHEADS[best]}  # {best}: {sums[best] / plain:.2f} of a layer without early launch"


class LaunchWay(NamedTuple):
    part: str  # whose checks must pass
    variant: str  # of a layer
    speaks: Callable[[int], bool]  # whether a layer of so many rows tells anything


def split(rows: int) -> bool:
    """Whether attention over short contexts is split: otherwise it is one launch anyway."""
    return default_splits(rows, KV_HEADS, SHORT, CHUNK) > 1


def rows_line(results: list[Result], failed: set[str], name: str, way: LaunchWay) -> str | None:
    """Rows up to which every layer measured was quicker so."""
    if way.part in failed:
        return f"{name} = 0  # wrong on this chip"
    ratios = {}
    for found in results:
        rows = int(found.name.split()[0]) if found.part == "layer" else 0
        if {WITHOUT, way.variant} <= set(found.kernels) and way.speaks(rows):
            ratios[rows] = found.kernels[way.variant] / found.kernels[WITHOUT]
    if not ratios:
        return None
    slower = min((rows for rows, ratio in ratios.items() if ratio >= 1), default=1 << 30)
    most = max((rows for rows in ratios if rows < slower), default=0)
    figures = ", ".join(f"{rows}: {ratio:.3f}" for rows, ratio in sorted(ratios.items()))
    return f"{name} = {most}  # of a layer's time in two launches, by rows: {figures}"


# Attention in one launch instead of two.
LAST = "LAST_ROWS", LaunchWay("decode", "512, attention in one", split)


def rewrite_rows(text: str, name: str, line: str | None) -> str:
    if line is None:
        return text
    text, count = re.subn(rf"^{name} = [^\n]*$", line, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"there is no line {name} to replace")
    return text


def rewrite_choice(text: str, lines: Iterable[str]) -> str:
    for line in lines:
        name = line.split('"')[1]
        text, count = re.subn(
            rf'^    "{name}": \w+,[^\n]*$', line.replace("\\", ""), text, flags=re.MULTILINE
        )
        if count != 1:
            raise ValueError(f"kernels/dispatch.py has {count} lines for {name!r}")
    return text


class Lines(NamedTuple):
    """What kernels/gemm/skinny.py is to say; None: nothing was measured, so the old stays."""

    tuned: list[str] | None
    left: list[str] | None
    ahead: str | None
    many: ManyLines | None  # of 128 and 256 rows


def skinny_lines(results: list[Result], failed: set[str], shapes: dict[str, tuple[int, int, bool]]) -> Lines:
    measured = {found.part for found in results if found.kernels and found.others}
    return Lines(
        tuned_lines(results, shapes) if "products" in measured else None,
        left_lines(results, shapes) if "qkv" in measured | failed else None,  # wrong: nothing is left
        ahead_line(results),
        ManyLines([], []) if "many" in failed else many_lines(results, shapes),
    )


def of_many(line: str) -> bool:
    """Whether a line of a table is for more than 64 rows."""
    return int(line.strip().lstrip("(").split(",")[0]) > skinny.MOST_ROWS


def rewrite_table(text: str, table: str, new: list[str], *, many: bool) -> str:
    """Its lines for many rows, or all others, are the new ones."""
    head = rf"^({table}: [^\n]*? = )\{{((?:\n[^}}]*)?)\}}$"
    found = re.findall(head, text, flags=re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"kernels/gemm/skinny.py has no table {table} to replace")
    kept = [line for line in found[0][1].splitlines() if line.strip() and of_many(line) != many]
    lines = [*kept, *new] if many else [*new, *kept]
    body = "\n".join(["{", *lines, "}"]) if lines else "{}"
    return re.sub(head, lambda match: match[1] + body, text, flags=re.MULTILINE)


def rewrite_skinny(text: str, lines: Lines) -> str:
    for table, few in (("TUNED", lines.tuned), ("LEFT", lines.left)):
        if few is not None:
            text = rewrite_table(text, table, few, many=False)
    if lines.many is not None:
        text = rewrite_table(text, "TUNED", lines.many.tuned, many=True)
        text = rewrite_table(text, "LEFT", lines.many.left, many=True)
    if lines.ahead is not None:
        text, count = re.subn(r"^AHEAD = [^\n]*$", lines.ahead, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError("kernels/gemm/skinny.py has no line AHEAD to replace")
    return text


def report(
    results: list[Result],
    failed: set[str],
    shapes: dict[str, tuple[int, int, bool]],
    chip: str,
    *,
    write: bool,
    show: Callable[[str], None] = print,
) -> None:
    chosen, lines = choice_lines(results, failed, chip), skinny_lines(results, failed, shapes)
    show("\nkernels/dispatch.py, CHOICE:")
    for line in chosen:
        show(line)
    show("\nkernels/gemm/skinny.py, TUNED, LEFT and AHEAD:")
    many = lines.many or ManyLines([], [])
    tuned, left = (*(lines.tuned or ()), *many.tuned), (*(lines.left or ()), *many.left)
    for line in (*tuned, *left, *([lines.ahead] if lines.ahead else ())):
        show(line)
    last = rows_line(results, failed, *LAST)
    show("\nLAST_ROWS in kernels/attention/decode.py:")
    show(last or "LAST_ROWS: not measured")
    if write:
        table, tunings, decode = (Path(str(room.__file__)) for room in (choice, skinny, paged_decode))
        compared = [line for line in chosen if NOT_COMPARED not in line]
        table.write_text(rewrite_choice(table.read_text(), compared))
        tunings.write_text(rewrite_skinny(tunings.read_text(), lines))
        decode.write_text(rewrite_rows(decode.read_text(), "LAST_ROWS", last))
        show(f"written: {table}, {tunings}, {decode}")
