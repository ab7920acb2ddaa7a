"""Each kernel against its reference on random shapes, outputs poisoned: what must hold before times count."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench import bare
from bench.candidates import CANDIDATES, TALL, TILES, fits
from saccade.kernels.attention.decode import DecodeTuning, decode_attention_triton
from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.attention.paged import (
    copy_block_reference,
    copy_block_triton,
    paged_attention_reference,
    sdpa_any_shape,
)
from saccade.kernels.attention.prefill import PrefillTuning, prefill_attention_triton
from saccade.kernels.attention.quantized_kv import FORMATS, read_slots
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.split_k import Norm, SplitKPartials
from saccade.kernels.norm_rope import elementwise, rope
from saccade.kernels.norm_rope.qk_norm_rope import HeadNorm, qk_norm_rope_reference, qk_norm_rope_triton
from saccade.kernels.sampling import greedy
from saccade.kernels.sampling import top_k_top_p as draw
from saccade.kernels.sampling.slot_state import (
    GatheredSlots,
    SlotState,
    advance_slots_reference,
    advance_slots_triton,
    gather_slots_reference,
    gather_slots_triton,
)
from saccade.kernels.vision import patchify
from saccade.kernels.vision.texture import channels_triton, means_triton, shrink_triton
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Pages
from saccade.lod import scorers as relevance
from saccade.lod import texture
from saccade.sampling import rng as noise

ROOT = bare.ROOT
# Largest error over the largest value of the answer.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(LIMITS)
# Of the largest value: one step of the format, for a value that lies on the border of two, and some rounding.
STEP = {torch.float8_e4m3fn: 32 / 448 + 4e-3, torch.int8: 1 / 127 + 4e-3}


Launch = Callable[..., Any]  # of a kernel with its arguments


class Check(NamedTuple):
    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN fails


def compared(name: str, made: Tensor, wanted: Tensor, dtype: torch.dtype) -> Check:
    error = (made.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-6)
    return Check(f"{name} {str(dtype)[6:]}", float(error), LIMITS[dtype])


def poisoned(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call it with every torch.empty full of NaN (integers: the least)."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> Tensor:
        made: Tensor = plain(*shape, **options)  # type: ignore[call-overload]
        if made.dtype == torch.bool:
            return made.fill_(False)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)

    torch.empty = empty
    try:
        return call(*args, **kwargs)
    finally:
        torch.empty = plain


class Share:
    """Stands for `poisoned` where kernels are only compiled: every n-th launch is made, none has a result."""

    def __init__(self, number: int, workers: int) -> None:
        self._number, self._workers, self._turn = number, workers, 0

    def __call__(self, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        self._turn += 1
        if self._turn % self._workers == self._number:
            call(*args, **kwargs)
        return torch.zeros(1, dtype=torch.int64)


def make_rows(
    dice: random.Random, device: torch.device, work: list[tuple[int, int]], decodes: int, block: int
) -> tuple[AttentionMetadata, int, Tensor]:
    """Rows of (count, context) with blocks in random order; the number of blocks, and the slots in use."""
    needed = [-(-context // block) for _, context in work]
    order = list(range(sum(needed) + 3))
    dice.shuffle(order)
    tables = torch.full((len(work), max(needed) + 2), 2**30, dtype=torch.int32)
    slots = []
    for row, (_, context) in enumerate(work):
        mine = [order.pop() for _ in range(needed[row])]
        tables[row, : needed[row]] = torch.tensor(mine, dtype=torch.int32)
        slots += [mine[place // block] * block + place % block for place in range(context)]
    counts, contexts = zip(*work, strict=True)
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    rows = AttentionMetadata(tables.to(device), lengths, offsets, counts, contexts, decodes, block)
    return rows, sum(needed) + 3, torch.tensor(slots, device=device)


def attention(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    shapes = [(32, 8, 128), (16, 16, 72), (16, 16, 80), (12, 4, 96), (8, 1, 64), (14, 2, 64), (28, 4, 128)]
    for turn, (heads, kv_heads, dim) in enumerate(shapes):
        for dtype in DTYPES if turn < 2 else (torch.bfloat16,):
            window = dice.choice([None, None, 1, 33, 500])
            block = dice.choice([16, 16, 8, 64])
            decodes = dice.randint(1, 9)
            work = [(1, dice.choice([1, block, block + 1, dice.randint(1, 3000)])) for _ in range(decodes)]
            for _ in range(dice.randint(1, 5)):
                count = dice.choice([1, 2, dice.randint(1, 400)])
                work.append((count, count + dice.choice([0, dice.randint(0, 900)])))
            rows, blocks, slots = make_rows(dice, device, work, decodes, block)
            pages = []
            for _ in "kv":  # NaN where nobody's token is
                flat = torch.full((blocks * block, kv_heads, dim), torch.nan, dtype=dtype, device=device)
                flat[slots] = torch.randn(len(slots), kv_heads, dim, device=device).to(dtype)
                pages.append(flat.view(blocks, block, kv_heads, dim))
            q = torch.randn(rows.num_tokens, heads + 2, dim, device=device).to(dtype)[:, 1:-1]
            clean = [torch.nan_to_num(part) for part in pages]
            with sdpa_any_shape(device):
                wanted = paged_attention_reference(q, clean[0], clean[1], rows, dim**-0.5, window)
            label = f"{heads}/{kv_heads} x {dim}, window {window}, block {block}"
            small = dtype == torch.float32  # fp32 tiles are twice as large
            tuning = DecodeTuning(splits=dice.choice([None, 1, 7]), tile=32 if small else 64, stages=2)
            tables = (rows.block_tables[:decodes], rows.seq_lens[:decodes], dim**-0.5, window, 4096)
            counters = torch.zeros(decodes * kv_heads, dtype=torch.int32, device=device)
            for last in (False, True):
                made = launch(
                    decode_attention_triton,
                    q[:decodes],
                    *pages,
                    *tables,
                    tuning._replace(last=last),
                    mode=KernelMode(counters=counters),
                )
                name = f"decode {label}{', one launch' if last else ''}"
                yield compared(name, made, wanted[:decodes], dtype)
            yield Check(f"counters after decode {label}", float(counters.abs().sum()), 0)
            out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
            launch(
                prefill_attention_triton,
                q,
                pages[0],
                pages[1],
                rows.block_tables[decodes:],
                rows.seq_lens[decodes:],
                rows.query_start_loc[decodes:],
                rows.num_tokens - decodes,
                out,
                dim**-0.5,
                window,
                PrefillTuning(32, 16, 8, 2) if small else PrefillTuning(),
            )
            yield compared(f"prefill {label}", out[decodes:], wanted[decodes:], dtype)


def captured(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """What captured steps add: tables by index, padding, rows that are gathered and move on."""
    heads, kv_heads, dim, block = 32, 8, 128, 16
    work = [(1, dice.randint(1, 700)) for _ in range(5)]
    rows, blocks, slots = make_rows(dice, device, work, 5, block)
    flat = torch.full((2, blocks * block, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device=device)
    flat[:, slots] = torch.randn(2, len(slots), kv_heads, dim, device=device).bfloat16()
    pages = flat.view(2, blocks, block, kv_heads, dim)
    q = torch.randn(8, heads, dim, device=device).bfloat16()
    clean = torch.nan_to_num(pages)
    with sdpa_any_shape(device):
        wanted = paged_attention_reference(q[:5], clean[0], clean[1], rows, dim**-0.5, None)
    order = torch.tensor(dice.sample(range(9), 5), device=device)
    tables = torch.full((10, rows.block_tables.shape[1]), 2**30, dtype=torch.int32, device=device)
    tables[order] = rows.block_tables
    step = torch.cat((order.int(), torch.full((3,), -1, dtype=torch.int32, device=device)))
    lengths = torch.cat((rows.seq_lens, torch.zeros(3, dtype=torch.int32, device=device)))
    made = launch(
        decode_attention_triton, q, pages[0], pages[1], tables, lengths, dim**-0.5, None, 4096, index=step
    )
    yield compared("decode by index, padded", made[:5], wanted, torch.bfloat16)
    kinds = (torch.int64, torch.int32, torch.float32, torch.int32)
    lines = [torch.randint(0, 90, (10,), device=device).to(kind) for kind in kinds]
    mine, theirs = (SlotState(tables.clone(), *(line.clone() for line in lines)) for _ in range(2))
    got = launch(gather_slots_triton, step, mine, block)
    wanted_rows = gather_slots_reference(step, theirs, block)
    for name, left, right in zip(
        GatheredSlots._fields, got, wanted_rows, strict=False
    ):  # one where only compiled
        yield Check(f"rows gathered: {name}", float((left != right).sum()), 0)
    tokens = torch.arange(100, 108, device=device)
    launch(advance_slots_triton, step, tokens, mine)
    advance_slots_reference(step, tokens, theirs)
    for name, left, right in zip(SlotState._fields, mine, theirs, strict=True):
        yield Check(f"rows moved on: {name}", float((left[:9] != right[:9]).sum()), 0)


def arriving(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """Attention in one launch, again and again, early too: always the same bits, and the counters are 0."""
    heads, kv_heads, dim = 32, 8, 128
    for count, context in ((1, 640), (8, 700), (16, 4000), (3, 30000)):
        work = [(1, dice.randint(1, context)) for _ in range(count)]
        rows, blocks, slots = make_rows(dice, device, work, count, 16)
        flat = torch.zeros(2, blocks * 16, kv_heads, dim, dtype=torch.bfloat16, device=device)
        flat[:, slots] = torch.randn(2, len(slots), kv_heads, dim, device=device).bfloat16()
        pages = flat.view(2, blocks, 16, kv_heads, dim)
        q = torch.randn(count, heads, dim, device=device).bfloat16()
        with sdpa_any_shape(device):
            wanted = paged_attention_reference(q, pages[0], pages[1], rows, dim**-0.5, None)
        counters = torch.zeros(count * kv_heads, dtype=torch.int32, device=device)
        for pdl in (False, True):
            tuning = DecodeTuning(last=True, pdl=pdl)
            rest = (rows.block_tables, rows.seq_lens, dim**-0.5, None, max(context, 4096), tuning)
            mode = KernelMode(counters=counters)
            made = launch(decode_attention_triton, q, *pages, *rest, mode=mode)
            others = [
                decode_attention_triton(q, pages[0], pages[1], *rest, mode=mode)
                for _ in range(200 if device.type == "cuda" else 0)
            ]
            label = f"{count} x {context}{', early' if pdl else ''}"
            yield compared(f"decode in one launch {label}", made, wanted, torch.bfloat16)
            differ = sum((other != made).any().int() for other in others)
            yield Check(f"... the same bits {label}", float(differ), 0)
            yield Check(f"... counters {label}", float(counters.abs().sum()), 0)


def compact(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """Blocks of two kinds, and of 8 bits alone, written and read by kernels and by references."""
    for form in FORMATS.values():
        for dtype in (torch.bfloat16, torch.float16):
            heads, kv_heads, dim = dice.choice([(32, 8, 128), (8, 2, 64), (12, 4, 96)])
            block = 16
            work = [(1, dice.randint(1, 2000)) for _ in range(5)]
            work += [(count, count + dice.randint(0, 900)) for count in (1, 70, 333)]
            rows, blocks, slots = make_rows(dice, device, work, 5, block)
            small = blocks if dice.random() < 0.3 else blocks // 2
            # One layer for the kernels, one for the reference implementation.
            (group,) = full_attention(2, kv_heads, dim, str(dtype).removeprefix("torch."), block)
            pages = Pages.allocate(group, blocks, device, small, form)
            made, true = pages.layer(0), pages.layer(1)
            if made is None or true is None:
                raise RuntimeError("pages without compact blocks")
            label = f"{str(form)[6:]} {small} of {blocks}"
            qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * dim, device=device).to(dtype)
            angles = torch.rand(len(slots), dim, device=device)
            rest = (angles.cos().to(dtype), angles.sin().to(dtype), slots)
            launch(qk_norm_rope_triton, qkv, heads, None, *rest, pages.k[0], pages.v[0], compact=made)
            qk_norm_rope_reference(qkv, heads, None, *rest, pages.k[1], pages.v[1], true)
            keys = (
                read_slots(pages.k[i], c.k, c.k_scale, c.first, slots) for i, c in enumerate((made, true))
            )
            yield Check(f"compact k {label}", relative(*keys), STEP[form])
            values = (
                read_slots(pages.v[i], c.v, c.v_scale, c.first, slots) for i, c in enumerate((made, true))
            )
            yield Check(f"compact v {label}", relative(*values), STEP[form])
            q = torch.randn(rows.num_tokens, heads, dim, device=device).to(dtype)
            with sdpa_any_shape(device):
                wanted = paged_attention_reference(q, pages.k[1], pages.v[1], rows, dim**-0.5, None, true)
            tables = (rows.block_tables[:5], rows.seq_lens[:5])
            out = launch(decode_attention_triton, q[:5], pages.k[1], pages.v[1], *tables, dim**-0.5, None,
                         2000, compact=true)  # fmt: skip
            yield compared(f"compact decode {label}", out, wanted[:5], dtype)
            out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
            tables3 = (rows.block_tables[5:], rows.seq_lens[5:], rows.query_start_loc[5:])
            launch(prefill_attention_triton, q, pages.k[1], pages.v[1], *tables3, rows.num_tokens - 5, out,
                   dim**-0.5, None, compact=true)  # fmt: skip
            yield compared(f"compact prefill {label}", out[5:], wanted[5:], dtype)


def relative(made: Tensor, wanted: Tensor) -> float:
    return float((made.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def finish(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    for heads, kv_heads, dim in ((32, 8, 128), (6, 2, 72), (5, 1, 96)):
        for dtype in DTYPES:
            tokens = dice.randint(1, 300)
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
            angles = torch.rand(tokens, dim, device=device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            weights = torch.randn(2, dim, device=device).to(dtype)
            norm = HeadNorm(weights[0], weights[1], 1e-6) if dim != 96 else None
            slots = torch.randperm(20 * 16, device=device)[:tokens]
            wanted_pages = torch.full((2, 20, 16, kv_heads, dim), torch.nan, dtype=dtype, device=device)
            made_pages = wanted_pages.clone()
            wanted = qk_norm_rope_reference(
                qkv, heads, norm, cos, sin, slots, wanted_pages[0], wanted_pages[1]
            )
            made = launch(
                qk_norm_rope_triton, qkv, heads, norm, cos, sin, slots, made_pages[0], made_pages[1]
            )
            label = f"{heads}/{kv_heads} x {dim}"
            yield compared(f"finish q {label}", made, wanted, dtype)
            foreign = not torch.equal(made_pages.isnan(), wanted_pages.isnan())
            pages = torch.nan_to_num(made_pages) + (torch.nan if foreign else 0)
            yield compared(f"finish pages {label}", pages, torch.nan_to_num(wanted_pages), dtype)


def projection(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    tunings = [t for t in CANDIDATES if t.splits > 1]
    yield from left([(t, (1, 8, 32, 64)[turn % 4]) for turn, t in enumerate(tunings)], device, launch)


def left(
    tried: list[tuple[skinny.SkinnyTuning, int]], device: torch.device, launch: Launch
) -> Iterator[Check]:
    """SplitKPartials added up by `qk_norm_rope`: the very bits of adding them up first. Tunings and rows."""
    heads, kv_heads, dim = 32, 8, 128
    width, depth = (heads + 2 * kv_heads) * dim, 4096
    weight = (torch.randn(width, depth, device=device) / 64).bfloat16()
    weights = torch.randn(2, dim, device=device).bfloat16()
    norm = HeadNorm(weights[0], weights[1], 1e-6)
    for turn, (tuning, rows) in enumerate(tried):
        blocks = rows // 16 + 1
        x = torch.randn(rows, depth, device=device).bfloat16()
        bias = torch.randn(width, device=device).bfloat16() if turn % 3 == 0 else None
        angles = torch.rand(rows, dim, device=device)
        slots = torch.randperm(16 * blocks, device=device)[:rows]
        rest = (angles.cos().bfloat16(), angles.sin().bfloat16(), slots)
        pages = torch.full((3, 2, blocks, 16, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device=device)
        parts = launch(skinny.skinny_partials, x, weight, bias, tuning)
        if not isinstance(parts, SplitKPartials):  # only compiled
            parts = SplitKPartials(torch.empty(tuning.splits, rows, width), bias, torch.bfloat16)
        whole = parts.reduce()
        apart = launch(qk_norm_rope_triton, whole, heads, norm, *rest, *pages[0])
        made = launch(qk_norm_rope_triton, parts, heads, norm, *rest, *pages[1])
        label = f"{rows} rows {tuning.name}"
        yield Check(f"qkv left q {label}", float((made != apart).sum()), 0)
        differ = torch.nan_to_num(pages[1]) != torch.nan_to_num(pages[0])
        yield Check(f"qkv left pages {label}", float(differ.sum()), 0)
        wanted = qk_norm_rope_reference(F.linear(x, weight, bias), heads, norm, *rest, *pages[2])
        yield compared(f"qkv left, reference {label}", made, wanted, torch.bfloat16)


def points(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    for dtype in DTYPES:
        for width in (4096, 1152, 1000):
            x, y = torch.randn(2, dice.randint(1, 70), width, device=device).to(dtype)
            w, b = torch.randn(2, width, device=device).to(dtype)
            made = launch(elementwise.add_norm_triton, x, y, w, None, 1e-6)[0]
            yield compared(
                f"rms norm {width}", made, elementwise.add_norm_reference(x, y, w, None, 1e-6)[0], dtype
            )
            made = launch(elementwise.add_norm_triton, x, y, w, b, 1e-6)[0]
            wanted = elementwise.add_norm_reference(x, y, w, b, 1e-6)[0]
            yield compared(f"layer norm {width}", made, wanted, dtype)
            made = launch(elementwise.silu_mul_triton, x)
            yield compared(f"silu * up {width}", made, elementwise.silu_mul_reference(x), dtype)
        x = torch.randn(90, 48, 72, device=device).to(dtype)
        angles = torch.rand(90, 72, device=device)
        made = launch(rope.apply_rotary_triton, x[:, :32], angles, angles)
        yield compared("rotation 72", made, rope.apply_rotary_reference(x[:, :32], angles, angles), dtype)
    positions = torch.randint(0, 480000, (3, 77), device=device) / 8
    frequencies = 5e6 ** -(torch.arange(64, device=device) / 64)
    axes = torch.tensor(rope.interleaved_axes((24, 20, 20), 64), device=device)
    wanted = rope.rotary_angles_reference(positions, frequencies, axes, torch.float32)[-1]
    made = launch(rope.rotary_angles_triton, positions, frequencies, axes, torch.float32)[-1]
    yield compared("angles", made, wanted, torch.float32)
    for inner in ((16, 8, 128), (8, 16), (3, 5, 40)):
        k, v = (torch.randn(36, 50, *inner, device=device) for _ in "kv")
        source, target = dice.randrange(50), dice.randrange(50)
        wanted = torch.stack((k, v))
        copy_block_reference(wanted[0], wanted[1], source, target)
        launch(copy_block_triton, k, v, source, target)
        yield Check(f"copy of a block of {inner}", float((torch.stack((k, v)) != wanted).sum()), 0)


def products(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    tunings = [None, *(CANDIDATES[i] for i in (2, 5, 11, 17))]
    for rows, columns, depth in (
        (1, 4096, 4096),
        (4, 4096, 4096),
        (7, 1000, 1032),
        (33, 4096, 1024),
        (64, 528, 12288),
    ):
        for tuning in tunings:
            if tuning is not None and tuning.mode == "fma" and rows > 1:
                continue
            for dtype in (torch.bfloat16,) if tuning else (torch.bfloat16, torch.float16):
                x = torch.randn(rows, depth, device=device).to(dtype)
                weight = (torch.randn(columns, depth, device=device) * depth**-0.5).to(dtype)
                try:
                    yield from product(x, weight, tuning, launch)
                except OutOfResources:
                    if tuning is None:  # a candidate may not fit; what an engine would run must
                        raise


def product(
    x: Tensor,
    weight: Tensor,
    tuning: skinny.SkinnyTuning | None,
    launch: Launch,
    *,
    only: bool | None = None,
) -> Iterator[Check]:
    """Plain, gated, normed. `only`: gated, or not at all, for a tuning that has no room for the other."""
    (rows, depth), columns, dtype = x.shape, weight.shape[0], x.dtype
    residual = torch.randn(rows, columns, device=x.device).to(dtype)
    norm = Norm(torch.randn(columns, device=x.device).to(dtype), 1e-6)
    label = f"{rows} x {columns} x {depth} {tuning.name if tuning else 'default'}"
    plain = F.linear(x, weight)
    if only is not False:
        made = launch(skinny.skinny_triton, x, weight, gated=True, tuning=tuning)[0]
        yield compared(f"gated {label}", made, elementwise.silu_mul_reference(plain), dtype)
    if only:
        return
    made = launch(skinny.skinny_triton, x, weight, tuning=tuning)[0]
    yield compared(f"product {label}", made, plain, dtype)
    made = launch(skinny.skinny_triton, x, weight, residual=residual, norm=norm, tuning=tuning)[0]
    wanted = elementwise.add_norm_reference(plain, residual, norm.weight, None, 1e-6)[0]
    yield compared(f"normed {label}", made, wanted, dtype)


def many(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """Every tile of up to 256 rows, each at one of three shapes, cut along K or not, launched early or not.
    Most are candidates that no table names: `chosen` has those that run."""
    tiles = [tile for some in TILES.values() for tile, _ in some]
    few = [tile._replace(lines=lines) for lines in (16, 32, 64) for tile in TALL if fits(tile, lines)]
    shapes = ((1536, 4096), (1000, 1032), (400, 12288))
    for turn, tile in enumerate((*tiles, *few)):
        lines = tile.lines or 0
        counts = (129, 200, 256) if lines == 256 or turn % 2 else (65, 100, 128)
        counts = counts if lines > 64 else (lines // 2 - 7, lines - 3, lines)
        at = dice.randrange(len(shapes))
        rows, (columns, depth) = counts[at], shapes[at]
        early = dice.random() < 0.5
        tuning = tile._replace(splits=dice.randint(1, 4), pdl=early, ahead=512 if early else 0)
        x = torch.randn(rows, depth, device=device).bfloat16()
        weight = (torch.randn(columns, depth, device=device) * depth**-0.5).bfloat16()
        yield from product(x, weight, tuning, launch)
    cut = [tile._replace(splits=4) for tile in tiles[::3]]
    yield from left([(t, (t.lines or 128) - 3 * turn) for turn, t in enumerate(cut)], device, launch)


def chosen(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """What the tables name, at the shapes they name it for; of wide ones as much as can be normed."""
    tuned = [(key, tuning) for key, tuning in skinny.TUNED.items() if tuning is not None]
    for turn, ((limit, columns, depth, gated), tuning) in enumerate(tuned):
        columns = min(columns * (1 + gated), elementwise.WIDEST)
        weight = (torch.randn(columns, depth, device=device) * depth**-0.5).bfloat16()
        early = turn % 2 == 0
        for rows in {limit, max(1, limit - dice.randint(0, 7))}:
            x = torch.randn(rows, depth, device=device).bfloat16()
            yield from product(x, weight, tuning._replace(pdl=early), launch, only=gated)
    left_over = [
        (tuning._replace(pdl=early), limit)
        for (limit, *_), tuning in skinny.LEFT.items()
        for early in (False, True)
    ]
    yield from left(left_over, device, launch)


def device_runs(x: Tensor) -> bool:
    """Whether kernels do more than compile."""
    return x.device.type == "cuda"


def samples(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """Errors here are the share of lines that chose another token: only sums on the very edge may differ."""
    rows, vocab = 48, 151936
    numbers = torch.arange(rows, device=device)
    for size in (0.0, 1.0, 2.4, 8.0):
        logits = (torch.randn(rows, vocab, device=device) * size).bfloat16()
        best, sound = launch(greedy.greedy_triton, logits)
        right = logits.gather(1, best.clamp(0, vocab - 1)[:, None]) == logits.amax(-1, keepdim=True)
        yield Check(f"greedy at {size}", 1 - float((right[:, 0] & sound).float().mean()), 0)
        for k, p in ((0, 1.0), (0, 0.9), (0, 0.99), (50, 1.0), (50, 0.8)):
            table = torch.zeros(rows, 9, dtype=torch.float64, device=device)
            table[:, :3] = torch.tensor([0.7, k, p], dtype=torch.float64, device=device)
            table[:, 7:] = torch.tensor([noise.key(dice.randint(0, 1 << 60)) for _ in range(rows)]).double()
            x = logits.float()
            x = (x - x.amax(-1, keepdim=True)) / 0.7
            ordered = x.sort(dim=-1, descending=True).values
            kept = x >= ordered[:, k - 1 : k] if k else torch.ones_like(x, dtype=torch.bool)
            shares = torch.where(ordered >= ordered[:, k - 1 : k] if k else ordered <= 0, ordered.exp(), 0)
            shares = shares / shares.sum(-1, keepdim=True)
            last = (shares.cumsum(-1) - shares < p).sum(-1, keepdim=True).clamp(min=1) - 1
            if p < 1:
                kept &= x >= ordered.gather(1, last)
            bits = noise.random_bits(noise.spread(vocab, x.device), noise.words(table[:, 7:].long(), numbers))
            wanted = (x.masked_fill(~kept, -torch.inf) - noise.log_exponential(bits)).argmax(-1)
            tokens = launch(draw.draw_triton, logits, numbers.int(), table, numbers)[0]
            yield Check(f"draw k {k} p {p} at {size}", 1 - float((tokens == wanted).float().mean()), 0.05)


def pixels(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """Whole numbers: the sums of float64 matrix products, equal or wrong."""
    for height, width, outputs, taps in ((90, 131, 57, 9), (300, 40, 112, 13)):
        frame = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, device=device)
        source = frame.permute(0, 2, 1)
        for along, length in (("x", width), ("y", height)):
            first = torch.tensor([dice.randint(0, length - 1) for _ in range(outputs)])
            weights = torch.randint(-(1 << 18), 1 << 19, (outputs, taps))
            dense = torch.zeros(outputs, length + taps, dtype=torch.float64)
            dense.scatter_(1, first[:, None] + torch.arange(taps), weights.double())
            wide = source.double() if along == "x" else source.double().permute(2, 1, 0)
            sums = wide.to(device) @ dense[:, :length].t().to(device)
            wanted = (sums / (1 << 22) + 0.5).floor().clamp(0, 255)
            wanted = wanted if along == "x" else wanted.permute(2, 1, 0)
            tables = first.int().to(device), weights.int().to(device)
            made = launch(patchify.resample_triton, source, *tables, along)
            yield Check(f"resample {along} {height} x {width}", float((made != wanted).sum()), 0)
    planes = torch.randint(0, 256, (1, 64, 3, 96), dtype=torch.uint8, device=device)
    table = torch.randn(3, 256, device=device)
    made = launch(patchify.patchify_triton, planes, table, (4, 6), 2, 16, 2, torch.float32)
    looked = table[torch.arange(3, device=device)[:, None], planes[0].long()]  # [64, 3, 96]
    cut = looked.view(2, 2, 16, 3, 3, 2, 16).permute(0, 4, 1, 5, 3, 2, 6).reshape(24, 3, 1, 256)
    yield compared("patchify", made, cut.expand(-1, -1, 2, -1).reshape(24, -1), torch.float32)


def textures(device: torch.device, dice: random.Random, launch: Launch) -> Iterator[Check]:
    """An image shrunk, its channels, their means over a grid of tokens; one after the other."""
    for height, width in ((90, 131), (1024, 1024), (767, 1500), (61, 40)):
        image = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, device=device)
        image[: height // 3] = dice.randint(0, 255)
        mode = KernelMode("torch")
        colour = texture.to_working_size(image, mode).contiguous()
        wanted = texture.channels(colour, mode)
        means = relevance.pool_channels(wanted, (3, 7, 11), (13, 9), mode)
        made = launch(shrink_triton, image, texture.working_size(height, width))
        yield compared(f"shrink {height} x {width}", made, colour, torch.float32)
        made = launch(channels_triton, colour, texture.shades(device))
        yield compared(f"texture {height} x {width}", made, wanted, torch.float32)
        made = launch(means_triton, wanted, (3, 7, 11), (13, 9))
        yield compared(f"means {height} x {width}", made, means, torch.float32)


CHECKS: dict[str, tuple[Callable[[torch.device, random.Random, Launch], Iterator[Check]], ...]] = {
    "decode": (attention, captured, arriving),
    "prefill": (),  # together with decode: the same rows
    "compact": (compact,),
    "finish": (finish,),
    "points": (points,),
    "products": (products,),
    "qkv": (projection,),
    "layer": (),  # made of the others
    "chosen": (chosen,),
    "many": (many,),
    "sample": (samples,),
    "pixels": (pixels, textures),
}
