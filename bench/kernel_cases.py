"""What bench/kernels.py times: kernel variants, references and libraries, at the sizes of Qwen3-VL-8B."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import bare
from bench.candidates import candidates
from saccade.kernels.attention.decode import SHORT, DecodeTuning, decode_attention_triton, default_splits
from saccade.kernels.attention.decode import default_tuning as decode_tuning
from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.attention.paged import copy_block_reference, copy_block_triton, paged_attention_reference
from saccade.kernels.attention.prefill import PrefillTuning, prefill_attention_triton
from saccade.kernels.attention.quantized_kv import FORMATS, Compact
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.split_k import Norm, SplitKPartials
from saccade.kernels.norm_rope import elementwise, rope
from saccade.kernels.norm_rope.qk_norm_rope import (
    HeadNorm,
    QkNormRopeTuning,
    kv_write_reference,
    qk_norm_rope_reference,
    qk_norm_rope_triton,
)
from saccade.kernels.sampling import greedy
from saccade.kernels.sampling import slot_state as device_rows
from saccade.kernels.sampling import top_k_top_p as draw
from saccade.kernels.vision import patchify
from saccade.kernels.vision.texture import channels_triton, means_triton, shrink_triton
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Pages
from saccade.lod.scorers import SALIENT, pool_channels
from saccade.lod.texture import EDGE, ENTROPY, LONGEST, channels, shades, to_working_size, working_size
from saccade.sampling import rng as noise

ROOT = bare.ROOT
BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 12288, 151936
L2 = 60 << 20  # inputs rotate over more than this, so that none is found in the cache

# The chip's own figures, shared/anchors.md table 2.
READ, COPY, PRODUCT, CAUSAL = 4.69e12, 4.29e12, 644e12, 561e12


class Case(NamedTuple):
    part: str
    name: str
    make: Callable[[torch.device, int], Any]  # inputs number i; made by `partial`, the sizes first
    copies: int  # how many inputs to rotate through
    kernels: dict[str, Callable[[Any], Any]]
    others: dict[str, Callable[[Any], Any]]  # the reference first, then the library's best
    ceiling: float  # seconds below which the chip cannot go


def data(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    return made.normal_() if device.type == "cuda" else made  # elsewhere it is only compiled for


def copies(nbytes: float) -> int:
    return max(2, min(16, int(L2 * 2 / nbytes) + 1))


# -- attention


class Paged(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    rows: AttentionMetadata
    counters: Tensor  # counters of attention in one launch


def paged(counts: list[int], contexts: list[int], device: torch.device, seed: int) -> Paged:
    widths = [-(-context // BLOCK) for context in contexts]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.zeros(len(counts), max(widths), dtype=torch.int32)
    start = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[start : start + width]
        start += width
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    decodes = len(counts) if set(counts) == {1} else 0
    rows = AttentionMetadata(
        tables.to(device), lengths, offsets, tuple(counts), tuple(contexts), decodes, BLOCK
    )
    k, v = (data(device, start, BLOCK, KV_HEADS, DIM) for _ in "kv")
    counters = torch.zeros(len(counts) * KV_HEADS, dtype=torch.int32, device=device)
    return Paged(data(device, sum(counts), HEADS, DIM), k, v, rows, counters)


def reference(p: Paged) -> Tensor:
    return paged_attention_reference(p.q, p.k, p.v, p.rows, DIM**-0.5, None)


DECODES = {
    "tile 64": DecodeTuning(),
    "tile 64 x4": DecodeTuning(stages=4),
    "tile 64 x2": DecodeTuning(stages=2),
    "tile 64 w8": DecodeTuning(warps=8),
    "tile 32 x4": DecodeTuning(tile=32, chunk=64, stages=4),
    "tile 32 w2 x4": DecodeTuning(tile=32, chunk=64, warps=2, stages=4),
    "tile 32 w2 x2": DecodeTuning(tile=32, chunk=64, warps=2, stages=2),
    "tile 16 w1 x4": DecodeTuning(tile=16, chunk=64, warps=1, stages=4),
    "tile 32": DecodeTuning(tile=32, chunk=64),
    "tile 32 w2": DecodeTuning(tile=32, chunk=64, warps=2),
    "tile 128": DecodeTuning(tile=128, chunk=128, stages=2),
    "chunk 128": DecodeTuning(chunk=128),
    "chunk 256": DecodeTuning(chunk=256),
    "tile 64, one launch": DecodeTuning(last=True),
    "tile 32 w2, one launch": DecodeTuning(tile=32, chunk=64, warps=2, last=True),
}


def decode_cases() -> Iterator[Case]:
    def call(tuning: DecodeTuning) -> Callable[[Paged], Tensor]:
        def run(p: Paged) -> Tensor:
            r = p.rows
            longest = max(r.seq_lens_cpu)
            mode = KernelMode(counters=p.counters)
            return decode_attention_triton(
                p.q, p.k, p.v, r.block_tables, r.seq_lens, DIM**-0.5, None, longest, tuning, mode=mode
            )

        return run

    for batch, context in (
        (1, 640),
        (8, 640),
        (32, 640),
        (128, 640),
        (256, 640),
        (128, 1120),
        (1, 8192),
        (8, 8192),
        (1, 65536),
    ):
        nbytes = batch * context * KV_HEADS * DIM * 4
        yield Case(
            "decode",
            f"{batch} x {context}",
            partial(paged, [1] * batch, [context - j % 61 for j in range(batch)]),
            copies(nbytes),
            {name: call(tuning) for name, tuning in DECODES.items()},
            {"reference": reference} if batch * context < 200_000 else {},
            nbytes / READ,
        )


PREFILLS = {
    "128x64 w8 s3": PrefillTuning(),
    "128x64 w8 s2": PrefillTuning(stages=2),
    "128x32 w8 s4": PrefillTuning(tile=32, stages=4),
    "128x128 w8 s2": PrefillTuning(tile=128, stages=2),
    "64x64 w4 s3": PrefillTuning(lines=64, warps=4),
}


# rows, queries of each, context of each
PROMPTS = (
    (1, 1088, 1088),
    (1, 4096, 4096),
    (1, 8192, 8192),
    (8, 1024, 1024),
    (1, 64, 1152),
    (1, 2048, 16384),
)


def fresh(p: Paged) -> Tensor:
    """The library's best on K and V that need no gathering: what a prompt from nothing could use."""
    tokens = p.q.shape[0]
    q = p.q.transpose(0, 1)[None]
    k, v = (pages.flatten(0, 1)[:tokens].transpose(0, 1)[None] for pages in (p.k, p.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gathered(backend: SDPBackend, p: Paged) -> Tensor:
    """A prompt from nothing: K and V copied out of the pages, then one kernel of the library."""
    tokens, slots = p.q.shape[0], p.rows.reference_reads(None).chunks[0].slots
    q = p.q.transpose(0, 1)[None]
    k, v = (pages.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None] for pages in (p.k, p.v))
    with sdpa_kernel([backend]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)[:tokens]


def prefill_cases() -> Iterator[Case]:
    def call(tuning: PrefillTuning) -> Callable[[Paged], Tensor]:
        def run(p: Paged) -> Tensor:
            r, out = p.rows, torch.empty_like(p.q)
            prefill_attention_triton(
                p.q,
                p.k,
                p.v,
                r.block_tables,
                r.seq_lens,
                r.query_start_loc,
                r.num_tokens,
                out,
                DIM**-0.5,
                None,
                tuning,
            )
            return out

        return run

    for rows, count, context in PROMPTS:
        flops = rows * 4 * DIM * HEADS * count * (context - count / 2)
        others: dict[str, Callable[[Any], Any]] = {"reference": reference}
        if rows == 1 and count == context:
            others["SDPA flash, gathered"] = partial(gathered, SDPBackend.FLASH_ATTENTION)
            others["SDPA cuDNN, gathered"] = partial(gathered, SDPBackend.CUDNN_ATTENTION)
            others["SDPA, no pages"] = fresh
        yield Case(
            "prefill",
            f"{rows} x {count} of {context}",
            partial(paged, [count] * rows, [context] * rows),
            2,
            {name: call(tuning) for name, tuning in PREFILLS.items()},
            others,
            flops / CAUSAL,
        )


# -- attention over blocks in 8 bits


class Small(NamedTuple):
    paged: Paged
    compact: Compact


def small_paged(form: str, share: float, counts: list[int], contexts: list[int], device: torch.device,
                seed: int) -> Small:  # fmt: skip
    """As `paged`, a share of its blocks compact; they are anywhere in the tables."""
    plain = paged(counts, contexts, device, seed)
    blocks = plain.k.shape[0]
    compact = round(blocks * share)
    (group,) = full_attention(1, KV_HEADS, DIM, "bfloat16", BLOCK)
    pages = Pages.allocate(group, blocks, device, compact, FORMATS[form])
    small = pages.layer(0)
    if small is None:
        raise ValueError(f"no block of {blocks} is compact at a share of {share}")
    if device.type == "cuda":
        slots = torch.arange(blocks * BLOCK, device=device)
        k, v = plain.k.flatten(0, 1), plain.v.flatten(0, 1)
        kv_write_reference(k, v, pages.k[0], pages.v[0], slots, small)
    return Small(plain._replace(k=pages.k[0], v=pages.v[0]), small)


def compact_cases() -> Iterator[Case]:
    def decode(tuning: DecodeTuning) -> Callable[[Small], Tensor]:
        def run(s: Small) -> Tensor:
            p, r = s.paged, s.paged.rows
            return decode_attention_triton(
                p.q,
                p.k,
                p.v,
                r.block_tables,
                r.seq_lens,
                DIM**-0.5,
                None,
                max(r.seq_lens_cpu),
                tuning,
                compact=s.compact,
            )

        return run

    def prefill(tuning: PrefillTuning) -> Callable[[Small], Tensor]:
        def run(s: Small) -> Tensor:
            p, r, out = s.paged, s.paged.rows, torch.empty_like(s.paged.q)
            tables = (r.block_tables, r.seq_lens, r.query_start_loc)
            prefill_attention_triton(
                p.q, p.k, p.v, *tables, r.num_tokens, out, DIM**-0.5, None, tuning, compact=s.compact
            )
            return out

        return run

    def reference(s: Small) -> Tensor:
        p = s.paged
        return paged_attention_reference(p.q, p.k, p.v, p.rows, DIM**-0.5, None, s.compact)

    for form, share in (("fp8", 1.0), ("int8", 1.0), ("fp8", 0.6), ("int8", 0.6)):
        for batch, context in ((1, 8192), (32, 640), (128, 640)):
            nbytes = batch * context * KV_HEADS * (4 * DIM * (1 - share) + 2 * (DIM + 4) * share)
            yield Case(
                "compact",
                f"{form} {share:.0%} {batch} x {context}",
                partial(small_paged, form, share, [1] * batch, [context - j % 61 for j in range(batch)]),
                copies(nbytes),
                {name: decode(DECODES[name]) for name in ("tile 64", "tile 32")},
                {"reference": reference},
                nbytes / READ,
            )
        for count, context in ((1088, 1088), (2048, 16384)):
            yield Case(
                "compact",
                f"{form} {share:.0%} {count} of {context}",
                partial(small_paged, form, share, [count], [context]),
                2,
                {name: prefill(PREFILLS[name]) for name in ("128x64 w8 s2", "128x32 w8 s4")},
                {"reference": reference},
                4 * DIM * HEADS * count * (context - count / 2) / CAUSAL,
            )
        yield from compact_finishes(form, share)


def compact_finishes(form: str, share: float) -> Iterator[Case]:
    def run(s: tuple[Finish, Compact]) -> Tensor:
        f, compact = s
        return qk_norm_rope_triton(
            f.qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v, QkNormRopeTuning(), compact
        )

    def make(tokens: int, device: torch.device, seed: int) -> tuple[Finish, Compact]:
        f = finish_inputs(tokens, device, seed)
        small = small_paged(form, share, [1], [max(tokens, 4 * BLOCK)], device, seed)
        return f._replace(k=small.paged.k, v=small.paged.v), small.compact

    for tokens in (32, 8192):
        nbytes = tokens * 2 * DIM * (2 * HEADS + 2 * KV_HEADS + KV_HEADS * (2 - share))
        yield Case(
            "compact",
            f"{form} {share:.0%} finish {tokens}",
            partial(make, tokens),
            copies(nbytes),
            {"8 heads w4": run},
            {},
            nbytes / COPY,
        )


# -- between the products


class Finish(NamedTuple):
    qkv: Tensor
    norm: HeadNorm
    cos: Tensor
    slots: Tensor
    k: Tensor
    v: Tensor


def finish_inputs(tokens: int, device: torch.device, _: int) -> Finish:
    blocks = tokens // BLOCK + 1
    k, v = (data(device, blocks, BLOCK, KV_HEADS, DIM) for _ in "kv")
    norm = HeadNorm(data(device, DIM), data(device, DIM), 1e-6)
    qkv, cos = data(device, tokens, (HEADS + 2 * KV_HEADS) * DIM), data(device, tokens, DIM)
    return Finish(qkv, norm, cos, torch.arange(tokens, device=device), k, v)


def finish_cases() -> Iterator[Case]:
    def call(tuning: QkNormRopeTuning) -> Callable[[Finish], Tensor]:
        return lambda f: qk_norm_rope_triton(f.qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v, tuning)

    tunings = {
        f"{heads} heads w{warps}": QkNormRopeTuning(heads, warps)
        for heads, warps in ((4, 1), (8, 4), (16, 4))
    }
    for tokens in (1, 32, 256, 8192):
        nbytes = tokens * 4 * (HEADS + 2 * KV_HEADS) * DIM
        yield Case(
            "finish",
            f"{tokens} tokens",
            partial(finish_inputs, tokens),
            copies(nbytes),
            {name: call(tuning) for name, tuning in tunings.items()},
            {
                "reference": lambda f: qk_norm_rope_reference(
                    f.qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v
                )
            },
            nbytes / COPY,
        )


def tensors(shapes: list[tuple[int, ...]], device: torch.device, _: int) -> list[Tensor]:
    return [data(device, *shape) for shape in shapes]


def point_cases() -> Iterator[Case]:
    def add_norms(warps: int | None, x: list[Tensor]) -> Any:
        return elementwise.add_norm_triton(x[0], x[1], x[2], None, 1e-6, warps)

    def silu(block: int, x: list[Tensor]) -> Any:
        return elementwise.silu_mul_triton(x[0], block)

    for tokens in (1, 32, 256, 8192):
        stream, inner = 8 * tokens * HIDDEN, 6 * tokens * INNER
        yield Case(
            "points",
            f"add + rms norm {tokens}",
            partial(tensors, [(tokens, HIDDEN), (tokens, HIDDEN), (HIDDEN,)]),
            copies(stream),
            {f"w{warps}": partial(add_norms, warps) for warps in (4, 8, 16)},
            {"reference": lambda x: elementwise.add_norm_reference(x[0], x[1], x[2], None, 1e-6)},
            stream / COPY,
        )
        yield Case(
            "points",
            f"silu * up {tokens}",
            partial(tensors, [(tokens, 2 * INNER)]),
            copies(inner),
            {f"block {block}": partial(silu, block) for block in (1024, 2048)},
            {"reference": lambda x: elementwise.silu_mul_reference(x[0])},
            inner / COPY,
        )


def angle_cases() -> Iterator[Case]:
    def make(tokens: int, device: torch.device, _: int) -> list[Tensor]:
        axes = torch.tensor(rope.interleaved_axes((24, 20, 20), DIM // 2), device=device)
        return [
            data(device, 3, tokens, dtype=torch.float32),
            data(device, DIM // 2, dtype=torch.float32),
            axes,
        ]

    for tokens in (1, 256, 8192):
        yield Case(
            "points",
            f"angles {tokens}",
            partial(make, tokens),
            4,
            {"kernel": lambda x: rope.rotary_angles_triton(x[0], x[1], x[2], BF16)},
            {"reference": lambda x: rope.rotary_angles_reference(x[0], x[1], x[2], BF16)},
            4 * tokens * DIM / COPY,
        )


def row_cases() -> Iterator[Case]:
    """The first and the last kernel of a captured decode step."""

    def make(rows: int, device: torch.device, _: int) -> tuple[Tensor, device_rows.SlotState, Tensor]:
        kinds = (torch.int64, torch.int32, torch.float32, torch.int32)
        lines = [torch.zeros(rows + 1, dtype=kind, device=device) for kind in kinds]
        tables = torch.zeros(rows + 1, 4096, dtype=torch.int32, device=device)
        step = torch.arange(rows, dtype=torch.int32, device=device)
        return step, device_rows.SlotState(tables, *lines), step.long()

    def kernels(x: tuple[Tensor, device_rows.SlotState, Tensor]) -> None:
        device_rows.gather_slots_triton(x[0], x[1], BLOCK)
        device_rows.advance_slots_triton(x[0], x[2], x[1])

    def references(x: tuple[Tensor, device_rows.SlotState, Tensor]) -> None:
        device_rows.gather_slots_reference(x[0], x[1], BLOCK)
        device_rows.advance_slots_reference(x[0], x[2], x[1])

    for rows in (1, 256):
        yield Case(
            "points",
            f"device rows {rows}",
            partial(make, rows),
            2,
            {"kernels": kernels},
            {"reference": references},
            2 * 40 * rows / COPY,
        )


def copy_cases() -> Iterator[Case]:
    """Of a pool of 38 GB: torch copies few layers at a time where they lie so far apart."""
    layers, blocks = 36, 16384

    def make(device: torch.device, _: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.zeros(layers, blocks, BLOCK, KV_HEADS, DIM, dtype=BF16, device=device) for _ in "kv")
        return k, v

    yield Case(
        "points",
        f"copy of a block, {layers} layers",
        make,
        1,
        {"kernel": lambda x: copy_block_triton(x[0], x[1], 7, 16000)},
        {"reference": lambda x: copy_block_reference(x[0], x[1], 7, 16000)},
        4 * layers * BLOCK * KV_HEADS * DIM * BF16.itemsize / COPY,
    )


PATCHES, VIT, VIT_INNER, VIT_HEADS, VIT_DIM = 4096, 1152, 4304, 16, 72


def vit_cases() -> Iterator[Case]:
    def rotate(x: list[Tensor]) -> Any:
        qk = x[0].view(PATCHES, 3 * VIT_HEADS, VIT_DIM)[:, : 2 * VIT_HEADS]
        return rope.apply_rotary_triton(qk, x[1], x[1])

    yield Case(
        "points",
        "ViT add + layer norm 4096",
        partial(tensors, [(PATCHES, VIT), (PATCHES, VIT), (VIT,)]),
        8,
        {"kernel": lambda x: elementwise.add_norm_triton(x[0], x[1], x[2], x[2], 1e-6)},
        {"reference": lambda x: elementwise.add_norm_reference(x[0], x[1], x[2], x[2], 1e-6)},
        8 * PATCHES * VIT / COPY,
    )
    yield Case(
        "points",
        "ViT rotation 4096",
        partial(tensors, [(PATCHES, 3 * VIT), (PATCHES, VIT_DIM)]),
        4,
        {"kernel": rotate},
        {
            "reference": lambda x: rope.apply_rotary_reference(
                x[0].view(PATCHES, -1, VIT_DIM)[:, : 2 * VIT_HEADS], x[1], x[1]
            )
        },
        8 * PATCHES * VIT / COPY,
    )


# -- products


PRODUCTS = {
    "qkv": (6144, HIDDEN, False),
    "o": (HIDDEN, HIDDEN, False),
    "gate_up": (INNER, HIDDEN, True),
    "down": (HIDDEN, INNER, False),
    "head": (VOCAB, HIDDEN, False),
}


class Product(NamedTuple):
    x: Tensor
    weight: Tensor


def product_cases(rows: tuple[int, ...]) -> Iterator[Case]:
    def make(m: int, n: int, k: int, device: torch.device, _: int) -> Product:
        return Product(data(device, m, k), data(device, n, k) / 64)

    def call(tuning: skinny.SkinnyTuning, gated: bool) -> Callable[[Product], Tensor]:
        return lambda p: skinny.skinny_triton(p.x, p.weight, gated=gated, tuning=tuning)[0]

    def library(gated: bool) -> Callable[[Product], Tensor]:
        if gated:
            return lambda p: elementwise.silu_mul_reference(F.linear(p.x, p.weight))
        return lambda p: F.linear(p.x, p.weight)

    for name, (columns, depth, gated) in PRODUCTS.items():
        for m in rows:
            lines = columns * (2 if gated else 1)
            yield Case(
                "products",
                f"{name} {m}",
                partial(make, m, lines, depth),
                copies(2 * lines * depth),
                {t.name: call(t, gated) for t in candidates(m, columns, depth, gated)},
                {"cuBLAS": library(gated), "one order": call(skinny.fixed_tuning(columns, depth), gated)},
                2 * lines * depth / READ,
            )


# -- the qkv product and what follows it: the parts added up by a launch of their own, or by the next kernel


class Projection(NamedTuple):
    product: Product
    finish: Finish


def projected(tuning: skinny.SkinnyTuning | None, left: bool, x: Projection) -> Tensor:
    """As in a captured step: launched early. No tuning: the library's product."""
    (values, weight), f = x
    rest = (HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v, QkNormRopeTuning(pdl=True))
    if tuning is None:
        return qk_norm_rope_triton(F.linear(values, weight), *rest)
    early = tuning._replace(pdl=True, ahead=skinny.AHEAD)
    if left:
        return qk_norm_rope_triton(skinny.skinny_partials(values, weight, None, early), *rest)
    return qk_norm_rope_triton(skinny.skinny_triton(values, weight, tuning=early)[0], *rest)


def projection_cases(rows: tuple[int, ...]) -> Iterator[Case]:
    columns, depth, _ = PRODUCTS["qkv"]

    def make(m: int, device: torch.device, seed: int) -> Projection:
        product = Product(data(device, m, depth), data(device, columns, depth) / 64)
        return Projection(product, finish_inputs(m, device, seed))

    for m in rows:
        tunings = [t for t in candidates(m, columns, depth, False) if t.splits > 1]
        now = skinny._measured(m, columns, depth, False)
        name = "now: " + (now.name if now else "cuBLAS")
        yield Case(
            "qkv",
            f"{m} rows",
            partial(make, m),
            copies(2 * columns * depth),
            {t.name: partial(projected, t, True) for t in tunings},
            {name: partial(projected, now, False)},
            2 * columns * depth / READ,
        )


# -- a whole layer of a decode step: what 36 of them make is the step


class Layer(NamedTuple):
    stream: Tensor
    normed: Tensor
    paged: Paged
    finish: Finish
    weights: dict[str, Tensor]
    norm: Norm


def make_layer(rows: int, context: int, device: torch.device, seed: int) -> Layer:
    p = paged([1] * rows, [context] * rows, device, seed)
    norm = HeadNorm(data(device, DIM), data(device, DIM), 1e-6)
    slots = p.rows.block_tables[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK
    finish = Finish(p.q, norm, data(device, rows, DIM), slots, p.k, p.v)
    weights = {
        name: data(device, PRODUCTS[name][0] * (2 if PRODUCTS[name][2] else 1), PRODUCTS[name][1]) / 64
        for name in ("qkv", "o", "gate_up", "down")
    }
    stream, normed = data(device, rows, HIDDEN), data(device, rows, HIDDEN)
    return Layer(stream, normed, p, finish, weights, Norm(data(device, HIDDEN), 1e-6))


class LayerWay(NamedTuple):
    """How a layer is launched; the fields with a default are what may be chosen."""

    pdl: bool = True
    ahead: int = 512
    left: bool = False  # qkv's parts are added up by `qk_norm_rope`
    last: bool = False  # attention in one launch


def run_layer(way: LayerWay, x: Layer) -> Any:
    """Nine launches: qkv (a tenth where its parts are added up apart), finish, attention in two, o in two,
    gate_up, down in two."""
    rows, mode = x.stream.shape[0], KernelMode(counters=x.paged.counters)

    def tuned(name: str) -> skinny.SkinnyTuning:
        tuning = skinny.default_tuning(rows, *PRODUCTS[name])
        return tuning._replace(pdl=way.pdl, ahead=way.ahead)

    def product(name: str, values: Tensor, **epilogue: Any) -> tuple[Tensor, Tensor]:
        gated = PRODUCTS[name][2]
        return skinny.skinny_triton(values, x.weights[name], gated=gated, tuning=tuned(name), **epilogue)

    f, p = x.finish, x.paged
    qkv: Tensor | SplitKPartials
    if way.left:
        columns, depth, _ = PRODUCTS["qkv"]
        tuning = skinny.partials_tuning(rows, columns, depth) or LEFT_UNMEASURED
        tuning = tuning._replace(pdl=way.pdl, ahead=way.ahead)
        qkv = skinny.skinny_partials(x.normed, x.weights["qkv"], None, tuning)
    else:
        qkv = product("qkv", x.normed)[0]
    q = qk_norm_rope_triton(
        qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v, QkNormRopeTuning(pdl=way.pdl)
    )
    splits = default_splits(rows, KV_HEADS, SHORT, DecodeTuning().chunk)  # as for the first context tier
    decode = decode_tuning(None, rows, rows * KV_HEADS * splits, SHORT)._replace(pdl=way.pdl, last=way.last)
    tables, lengths = p.rows.block_tables, p.rows.seq_lens
    seen = decode_attention_triton(q, p.k, p.v, tables, lengths, DIM**-0.5, None, SHORT, decode, mode=mode)
    normed, stream = product("o", seen.flatten(1), residual=x.stream, norm=x.norm)
    return product("down", product("gate_up", normed)[0], residual=stream, norm=x.norm)


def reference_layer(x: Layer) -> Any:
    f, p, w = x.finish, x.paged, x.weights
    norm = x.norm.weight, None, x.norm.eps
    qkv = F.linear(x.normed, w["qkv"])
    q = qk_norm_rope_reference(qkv, HEADS, f.norm, f.cos, f.cos, f.slots, f.k, f.v)
    seen = paged_attention_reference(q, p.k, p.v, p.rows, DIM**-0.5, None).flatten(1)
    normed, stream = elementwise.add_norm_reference(F.linear(seen, w["o"]), x.stream, *norm)
    inner = elementwise.silu_mul_reference(F.linear(normed, w["gate_up"]))
    return elementwise.add_norm_reference(F.linear(inner, w["down"]), stream, *norm)


LEFT_UNMEASURED = skinny.SkinnyTuning(64, 128, 3, 4, 5, "swap")  # where LEFT has no line yet
LAYERS = {
    "plain": LayerWay(pdl=False, ahead=0),
    "pdl": LayerWay(ahead=0),
    "pdl, 512 ahead": LayerWay(),
    "pdl, 2048 ahead": LayerWay(ahead=2048),
    "512, qkv left": LayerWay(left=True),
    "512, attention in one": LayerWay(last=True),
    "512, qkv and attention": LayerWay(left=True, last=True),
    "plain, qkv and attention": LayerWay(pdl=False, ahead=0, left=True, last=True),
}


def layer_cases() -> Iterator[Case]:
    weights = 2 * (6144 * HIDDEN + HIDDEN * HIDDEN + 3 * INNER * HIDDEN)
    for rows, context in ((1, 640), (4, 640), (8, 640), (16, 640), (32, 640), (64, 640)):
        yield Case(
            "layer",
            f"{rows} x {context}",
            partial(make_layer, rows, context),
            4,
            {name: partial(run_layer, way) for name, way in LAYERS.items()},
            {"reference": reference_layer},
            (weights + rows * context * KV_HEADS * DIM * 4) / READ,
        )


# -- sampling


class Draw(NamedTuple):
    logits: Tensor
    rows: Tensor
    parameters: Tensor  # the sampler's table
    outputs: Tensor


def make_draw(rows: int, size: float, k: int, p: float, device: torch.device, seed: int) -> Draw:
    table = torch.zeros(rows, 9, dtype=torch.float64)
    table[:, :3] = torch.tensor([0.8, k, p])
    table[:, 7:] = torch.tensor([noise.key(seed * rows + row) for row in range(rows)], dtype=torch.float64)
    numbers = torch.arange(rows, device=device)
    return Draw(data(device, rows, VOCAB) * size, numbers.int(), table.to(device), numbers)


def sorted_draw(d: Draw) -> Tensor:
    """Top-p as the reference does it on a GPU: a full sort."""
    x = d.logits.float()
    x = (x - x.amax(-1, keepdim=True)) / d.parameters[:, :1].float()
    best = x.sort(dim=-1, descending=True).values
    shares = best.softmax(-1)
    kept = (shares.cumsum(-1) - shares < d.parameters[:, 2:3].float()).sum(-1, keepdim=True).clamp(min=1)
    x = x.masked_fill(x < best.gather(1, kept - 1), -torch.inf)
    words = noise.words(d.parameters[:, 7:].long(), d.outputs)
    bits = noise.random_bits(noise.spread(VOCAB, x.device), words)
    return (x - noise.log_exponential(bits)).argmax(-1)


DRAWS = {
    "as set": draw.DrawTuning(),
    "tile 512": draw.DrawTuning(tile=512),
    "tile 2048": draw.DrawTuning(tile=2048),
    "1024": draw.DrawTuning(1024),
    "4096": draw.DrawTuning(4096),
    "4096 w2": draw.DrawTuning(4096, 2048, warps=2),
    "every 20": draw.DrawTuning(every=20),
    "block 512": draw.DrawTuning(block=512),
    "block 2048": draw.DrawTuning(block=2048),
}
BESTS = {name: greedy.GreedyTuning(size, warps=warps) for name, size, warps in (
    ("8192 w4", 8192, 4), ("8192 w8", 8192, 8), ("2048 w4", 2048, 4))}  # fmt: skip


def sample_cases() -> Iterator[Case]:
    """kernels/sampling/top_k_top_p.py has the microseconds of each of its kernels; `--inside` shows them."""

    def best(tuning: greedy.GreedyTuning, d: Draw) -> Any:
        return greedy.greedy_triton(d.logits, tuning)

    def drawn(tuning: draw.DrawTuning, d: Draw) -> Any:
        return draw.draw_triton(d.logits, d.rows, d.parameters, d.outputs, tuning)

    for rows in (1, 32, 256):
        nbytes = rows * VOCAB * 2
        yield Case(
            "sample",
            f"greedy {rows}",
            partial(make_draw, rows, 1.0, 0, 1.0),
            copies(nbytes),
            {name: partial(best, tuning) for name, tuning in BESTS.items()},
            {"reference": lambda d: (d.logits.argmax(-1), d.logits.sum(-1).isfinite())},
            nbytes / READ,
        )
        for kind, size, k, p in (
            ("top-p, flat", 1.0, 0, 0.9),
            ("top-p, peaked", 8.0, 0, 0.9),
            ("top-k 50, flat", 1.0, 50, 0.95),
        ):
            yield Case(
                "sample",
                f"{kind} {rows}",
                partial(make_draw, rows, size, k, p),
                2,
                {name: partial(drawn, tuning) for name, tuning in DRAWS.items()},
                {"reference": sorted_draw} if not k else {},
                nbytes / READ,
            )


# -- pixels


class Pixels(NamedTuple):
    frame: Tensor  # [height, width, 3] uint8
    first: tuple[Tensor, Tensor]  # along x, along y
    weights: tuple[Tensor, Tensor]
    table: Tensor


def pixel_cases() -> Iterator[Case]:
    def make(height: int, width: int, rows: int, columns: int, device: torch.device, _: int) -> Pixels:
        """Weights of a plain average over the window: as many taps as the cubic has."""
        first, weights = [], []
        for have, want in ((width, columns * 16), (height, rows * 16)):
            taps = int(4 * max(have / want, 1)) + 1
            first.append((torch.arange(want) * have // want).clamp(max=max(have - taps, 0)).int().to(device))
            weights.append(torch.full((want, taps), (1 << 22) // taps, dtype=torch.int32, device=device))
        frame = torch.empty(height, width, 3, dtype=torch.uint8, device=device)
        table = data(device, 3, 256, dtype=torch.float32)
        return Pixels(frame.fill_(77), (first[0], first[1]), (weights[0], weights[1]), table)

    def run(tuning: patchify.PatchTuning, grid: tuple[int, int], p: Pixels) -> Tensor:
        rows = p.frame.permute(0, 2, 1)
        rows = patchify.resample_triton(rows, p.first[0], p.weights[0], "x", tuning)
        rows = patchify.resample_triton(rows, p.first[1], p.weights[1], "y", tuning)
        return patchify.patchify_triton(rows[None], p.table, grid, 2, 16, 2, BF16)

    for height, width, grid in ((1024, 1024, (62, 62)), (1080, 1920, (66, 120)), (4096, 4096, (126, 126))):
        nbytes = 3 * height * width + 6 * height * grid[1] * 16 + 15 * 256 * grid[0] * grid[1]
        tunings = {"256 w2": patchify.PatchTuning(), "512 w4": patchify.PatchTuning(512, 4)}
        yield Case(
            "pixels",
            f"{height} x {width} to {grid[0]} x {grid[1]}",
            partial(make, height, width, *grid),
            copies(nbytes),
            {name: partial(run, tuning, grid) for name, tuning in tunings.items()},
            {},
            nbytes / COPY,
        )


def texture_cases() -> Iterator[Case]:
    """Of an image, with means of its channels over tokens and over places in them."""
    grid, refine = (13, 13), (52, 52)

    def make(side: int, device: torch.device, _: int) -> Tensor:
        return torch.zeros(side, side, 3, dtype=torch.uint8, device=device).random_()

    def kernels(image: Tensor) -> tuple[Tensor, ...]:
        colour = shrink_triton(image, working_size(*image.shape[:2]))
        made = channels_triton(colour, shades(image.device))
        return means_triton(made, SALIENT, grid), means_triton(made, (ENTROPY, EDGE), refine)

    def reference(image: Tensor) -> tuple[Tensor, ...]:
        mode = KernelMode("torch")
        made = channels(to_working_size(image, mode), mode)
        return pool_channels(made, SALIENT, grid, mode), pool_channels(made, (ENTROPY, EDGE), refine, mode)

    for side in (448, 1024, 2048):
        nbytes = 3 * side * side + 16 * 4 * min(side, LONGEST) ** 2
        name, size = f"texture of {side} x {side}", partial(make, side)
        yield Case("pixels", name, size, 2, {"kernels": kernels}, {"reference": reference}, nbytes / COPY)


def cases(parts: set[str], rows: tuple[int, ...]) -> list[Case]:
    every = [
        *decode_cases(),
        *prefill_cases(),
        *compact_cases(),
        *finish_cases(),
        *point_cases(),
        *angle_cases(),
        *row_cases(),
        *copy_cases(),
        *vit_cases(),
        *product_cases(rows),
        *projection_cases(rows),
        *layer_cases(),
        *sample_cases(),
        *pixel_cases(),
        *texture_cases(),
    ]
    return [case for case in every if case.part in parts]
