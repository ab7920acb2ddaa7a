"""What bench/kernels.py times at 128 and 256 rows: products with what follows them, alone and in a layer.

The library's way is that of the engine where no line of the tables says otherwise: cuBLAS, then a kernel for
silu * up, or for residual and norm. Ours has those in its epilogue or in the launch that adds up the splits,
and leaves the parts of qkv to `qk_norm_rope` ("left"). A layer of the library is timed beside the same layer
with one product by one candidate ("o: 128 64 4 ..."), and with all four at once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.candidates import candidates
from bench.kernel_cases import (
    BF16,
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PRODUCT,
    PRODUCTS,
    READ,
    Case,
    Finish,
    Layer,
    copies,
    data,
    finish_inputs,
    make_layer,
)
from saccade.kernels.attention.decode import SHORT, decode_attention_triton
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.skinny import SkinnyTuning
from saccade.kernels.gemm.split_k import Norm, SplitKPartials
from saccade.kernels.norm_rope.elementwise import add_norm_triton, silu_mul_triton
from saccade.kernels.norm_rope.qk_norm_rope import QkNormRopeTuning, qk_norm_rope_triton

ROWS, CONTEXT = (128, 256), 640
LAYER = ("qkv", "o", "gate_up", "down")
LIBRARY, LEFT = "library", "left "  # names of variants: the first of the others; how those with parts begin


class Ended(NamedTuple):
    """Inputs of a product and of what follows it."""

    x: Tensor
    weight: Tensor
    stream: Tensor
    norm: Norm
    finish: Finish | None  # of qkv


class Ways(NamedTuple):
    """How each product of a layer is made; those not named: by the library."""

    by: dict[str, SkinnyTuning]
    left: bool = False  # the parts of qkv are added up by `qk_norm_rope`


def launched(tuning: SkinnyTuning, mode: KernelMode) -> SkinnyTuning:
    return tuning._replace(pdl=mode.pdl, ahead=tuning.ahead or skinny.AHEAD)


def product(
    name: str, way: SkinnyTuning | None, left: bool, x: Ended, mode: KernelMode
) -> tuple[Tensor | SplitKPartials, Tensor]:
    """What comes out of it, and the stream behind it; as in a captured step, launched early if the mode
    says so."""
    gated, normed = PRODUCTS[name][2], name in ("o", "down")
    if way is None:
        y = F.linear(x.x, x.weight) if x.x.is_cuda else data(x.x.device, x.x.shape[0], x.weight.shape[0])
        if normed:
            return add_norm_triton(y, x.stream, x.norm.weight, None, x.norm.eps, pdl=mode.pdl)
        return (silu_mul_triton(y, pdl=mode.pdl) if gated else y), x.stream
    if left:
        return skinny.skinny_partials(x.x, x.weight, None, launched(way, mode)), x.stream
    rest: dict[str, Any] = {"residual": x.stream, "norm": x.norm} if normed else {}
    return skinny.skinny_triton(x.x, x.weight, gated=gated, tuning=launched(way, mode), **rest)


def alone(name: str, way: SkinnyTuning | None, left: bool, x: Ended) -> Any:
    mode = KernelMode(pdl=True)
    made = product(name, way, left, x, mode)[0]
    return made if x.finish is None else finished(made, x.finish, mode)


def finished(qkv: Tensor | SplitKPartials, f: Finish, mode: KernelMode) -> Tensor:
    return qk_norm_rope_triton(
        qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v, QkNormRopeTuning(pdl=mode.pdl)
    )


def layer(ways: Ways, x: Layer, *, early: bool = True) -> Any:
    p = x.paged
    mode = KernelMode(pdl=early, counters=p.counters)

    def made(name: str, values: Tensor, stream: Tensor, left: bool = False) -> tuple[Any, Tensor]:
        inputs = Ended(values, x.weights[name], stream, x.norm, None)
        return product(name, ways.by.get(name), left, inputs, mode)

    q = finished(made("qkv", x.normed, x.stream, ways.left)[0], x.finish, mode)
    tables, lengths = p.rows.block_tables, p.rows.seq_lens
    seen = decode_attention_triton(q, p.k, p.v, tables, lengths, DIM**-0.5, None, SHORT, mode=mode)
    normed, stream = made("o", seen.flatten(1), x.stream)
    return made("down", made("gate_up", normed, stream)[0], stream)


def tall(name: str, rows: int) -> SkinnyTuning:
    """The candidate that reads x least often: what the paper says is best."""
    fitting = [t for t in candidates(rows, *PRODUCTS[name]) if t.lines == rows]
    return max(fitting, key=lambda t: (t.columns == 192, t.columns, -t.warps, -t.splits))


def tables(rows: int) -> Ways:
    """As an engine would choose now."""
    columns, depth, _ = PRODUCTS["qkv"]
    found = {name: skinny._measured(rows, *PRODUCTS[name]) for name in LAYER}
    by = {name: t for name, t in found.items() if t is not None and t is not skinny.BEST_UNKNOWN}
    left = skinny.partials_tuning(rows, columns, depth)
    return Ways(by if left is None else by | {"qkv": left}, left is not None)


def layer_case(rows: int) -> Case:
    every = {name: tall(name, rows) for name in LAYER}
    ways = {"all four": Ways(every), "all four, qkv left": Ways(every, left=True)}
    if tables(rows).by:
        ways["as the tables say"] = tables(rows)
    for name in LAYER:
        for t in candidates(rows, *PRODUCTS[name]):
            ways[f"{name}: {t.name}"] = Ways({name: t})
            if name == "qkv" and t.splits > 1:
                ways[f"{name}: {LEFT}{t.name}"] = Ways({name: t}, left=True)
    nbytes = 2 * (6144 * HIDDEN + HIDDEN * HIDDEN + 3 * INNER * HIDDEN)
    return Case(
        "many",
        f"layer {rows}",
        partial(make_layer, rows, CONTEXT),
        4,
        {name: partial(layer, way) for name, way in ways.items()},
        {LIBRARY: partial(layer, Ways({}))},
        max(nbytes / READ, nbytes * rows / PRODUCT) + rows * CONTEXT * KV_HEADS * DIM * 4 / READ,
    )


def make_ended(name: str, rows: int, device: torch.device, seed: int) -> Ended:
    columns, depth, gated = PRODUCTS[name]
    weight = data(device, columns * (2 if gated else 1), depth) / 64
    norm = Norm(torch.ones(columns, dtype=BF16, device=device), 1e-6)
    finish = finish_inputs(rows, device, seed) if name == "qkv" else None
    return Ended(data(device, rows, depth), weight, data(device, rows, columns), norm, finish)


def product_case(name: str, rows: int) -> Case:
    columns, depth, gated = PRODUCTS[name]
    kernels: dict[str, Callable[[Ended], Any]] = {}
    for t in candidates(rows, columns, depth, gated):
        kernels[t.name] = partial(alone, name, t, False)
        if name == "qkv" and t.splits > 1:
            kernels[LEFT + t.name] = partial(alone, name, t, True)
    nbytes = 2 * columns * (2 if gated else 1) * depth
    return Case(
        "many",
        f"{name} {rows}",
        partial(make_ended, name, rows),
        copies(nbytes),
        kernels,
        {LIBRARY: partial(alone, name, None, False)},
        max(nbytes / READ, nbytes * rows / PRODUCT),  # 2 bytes a weight, and 2 FLOP a row
    )


def many_cases(parts: set[str]) -> Iterator[Case]:
    if "many" in parts:
        for rows in ROWS:
            yield from (product_case(name, rows) for name in PRODUCTS)
            yield layer_case(rows)
