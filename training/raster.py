"""Scenes to pixels on the GPU: every tile of every image walks its image's primitives and blends those that
touch it.

Signed distance d (inside positive) of each mark at the pixel's middle; coverage = clip(d + 1/2, 0, 1);
colour = lerp by coverage. The reference implementation is saccade/tools/evaluation/renderer.py; `python -m
training.raster` compares both."""

from __future__ import annotations

import numpy as np
import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]
from numpy.typing import NDArray
from torch import Tensor

from saccade.tools.evaluation import renderer as atlas
from saccade.tools.evaluation.renderer import paint

from .scenes.generate import KINDS, make_scene, pack
from .scenes.words import EVAL

ROW = 18  # the columns of a primitive, then left, top, right, bottom of a box that surely holds the mark
TILE_X, TILE_Y = 32, 16


@triton.jit
def _raster(
    rows,
    counts,
    ground,
    cells,
    out,
    width,
    height,
    most,  # type: ignore[no-untyped-def]
    ROW: tl.constexpr,  # noqa: N803
    CELL_W: tl.constexpr,  # noqa: N803
    CELL_H: tl.constexpr,  # noqa: N803
    TILE_X: tl.constexpr,  # noqa: N803
    TILE_Y: tl.constexpr,  # noqa: N803
):
    across = tl.cdiv(width, TILE_X)
    tile, image = tl.program_id(0), tl.program_id(1)
    left, top = (tile % across) * TILE_X, (tile // across) * TILE_Y
    xi = left + tl.arange(0, TILE_X)[None, :]
    yi = top + tl.arange(0, TILE_Y)[:, None]
    x, y = xi.to(tl.float32) + 0.5, yi.to(tl.float32) + 0.5
    g = ground + image * 8
    blend = (xi + yi).to(tl.float32) / (width + height - 2)
    h = (yi * width + xi).to(tl.uint32) * 2654435761 + tl.load(g + 7).to(tl.uint32)
    h = (h ^ (h >> 15)) * 2246822519
    h = (h ^ (h >> 13)) * 3266489917
    h = h ^ (h >> 16)
    noise = ((h & 255).to(tl.float32) - 127.5) * tl.load(g + 6).to(tl.float32) / 127.5
    r0, g0, b0 = tl.load(g).to(tl.float32), tl.load(g + 1).to(tl.float32), tl.load(g + 2).to(tl.float32)
    red = r0 + (tl.load(g + 3).to(tl.float32) - r0) * blend + noise
    green = g0 + (tl.load(g + 4).to(tl.float32) - g0) * blend + noise
    blue = b0 + (tl.load(g + 5).to(tl.float32) - b0) * blend + noise
    for i in range(tl.load(counts + image)):
        row = rows + (image * most + i) * ROW
        touches = (tl.load(row + 14) < left + TILE_X) & (tl.load(row + 16) > left)
        touches = touches & (tl.load(row + 15) < top + TILE_Y) & (tl.load(row + 17) > top)
        if touches:
            kind = tl.load(row)
            c3, c4, c5, c6, c7 = (
                tl.load(row + 3),
                tl.load(row + 4),
                tl.load(row + 5),
                tl.load(row + 6),
                tl.load(row + 7),
            )
            c8, c9 = tl.load(row + 8), tl.load(row + 9)
            dx, dy = x - tl.load(row + 1), y - tl.load(row + 2)
            if kind == 1.0:
                u = (dx * c3 + dy * c4) * c5 + (CELL_W / 2 - 0.5)
                v = (dy * c3 - dx * c4) * c5 + (CELL_H / 2 - 0.5)
                u = tl.minimum(tl.maximum(u, 0.0), CELL_W - 1.001)
                v = tl.minimum(tl.maximum(v, 0.0), CELL_H - 1.001)
                ui, vi = u.to(tl.int32), v.to(tl.int32)
                fu, fv = u - ui.to(tl.float32), v - vi.to(tl.float32)
                at = cells + c6.to(tl.int32) * (CELL_W * CELL_H) + vi * CELL_W + ui
                a, b = tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)
                c, e = tl.load(at + CELL_W).to(tl.float32), tl.load(at + CELL_W + 1).to(tl.float32)
                upper, lower = a + (b - a) * fu, c + (e - c) * fu
                d = (upper + (lower - upper) * fv - 128.0) / (16.0 * c5)
            else:
                if kind == 0.0:
                    qx = tl.abs(dx * c3 + dy * c4) - c5 + c7
                    qy = tl.abs(dy * c3 - dx * c4) - c6 + c7
                    ox, oy = tl.maximum(qx, 0.0), tl.maximum(qy, 0.0)
                    d = c7 - tl.sqrt(ox * ox + oy * oy) - tl.minimum(tl.maximum(qx, qy), 0.0)
                else:
                    first, last = c6 * dy - c7 * dx, c9 * dx - c8 * dy
                    wedge = tl.where(c3 > 0, tl.maximum(first, last), tl.minimum(first, last))
                    d = tl.minimum(c5 - tl.sqrt(dx * dx + dy * dy), wedge)
            cover = tl.minimum(tl.maximum(d + 0.5, 0.0), 1.0) * tl.load(row + 13)
            red += (tl.load(row + 10) - red) * cover
            green += (tl.load(row + 11) - green) * cover
            blue += (tl.load(row + 12) - blue) * cover
    inside = (xi < width) & (yi < height)
    to = out + (image.to(tl.int64) * height * width + yi * width + xi) * 3
    tl.store(to, tl.minimum(tl.maximum(red + 0.5, 0.0), 255.0).to(tl.uint8), mask=inside)
    tl.store(to + 1, tl.minimum(tl.maximum(green + 0.5, 0.0), 255.0).to(tl.uint8), mask=inside)
    tl.store(to + 2, tl.minimum(tl.maximum(blue + 0.5, 0.0), 255.0).to(tl.uint8), mask=inside)


def with_bounds(rows: Tensor) -> Tensor:
    """rows [b, p, 14] -> [b, p, 18]."""
    kind, p0, p1, sine = rows[..., 0], rows[..., 5], rows[..., 6], rows[..., 4]
    tilted = sine != 0
    reach_x = (
        torch.where(kind == 1, 33.0 / p0.clamp(min=1e-3), torch.where((kind == 0) & tilted, p0 + p1, p0))
        + 1.5
    )
    reach_y = (
        torch.where(
            kind == 1, 33.0 / p0.clamp(min=1e-3), torch.where(kind == 0, torch.where(tilted, p0 + p1, p1), p0)
        )
        + 1.5
    )
    x, y = rows[..., 1], rows[..., 2]
    return torch.cat(
        [rows, torch.stack([x - reach_x, y - reach_y, x + reach_x, y + reach_y], -1)], -1
    ).contiguous()


class Painter:
    """Owns the atlas on one device; gives uint8 images [b, height, width, 3]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cells = torch.from_numpy(atlas.CELLS).to(device)

    def __call__(self, rows: Tensor, counts: Tensor, ground: Tensor, width: int, height: int) -> Tensor:
        b, most = rows.shape[:2]
        if self.device.type == "cpu":
            drawn = [
                paint(r[: int(n)].numpy(), g.numpy(), width, height)
                for r, n, g in zip(rows, counts, ground, strict=True)
            ]
            return torch.from_numpy(np.stack(drawn))
        out = torch.empty(b, height, width, 3, dtype=torch.uint8, device=self.device)
        tiles = triton.cdiv(width, TILE_X) * triton.cdiv(height, TILE_Y)
        _raster[(tiles, b)](
            with_bounds(rows),
            counts,
            ground,
            self.cells,
            out,
            width,
            height,
            most,
            ROW=ROW,
            CELL_W=atlas.CELL_W,
            CELL_H=atlas.CELL_H,
            TILE_X=TILE_X,
            TILE_Y=TILE_Y,
            num_warps=4,
        )
        return out


def dense_targets(rows: Tensor, labels: Tensor, width: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """What lies where, per token: characters [b, m, 32] in cells of 4 x 8 pixels, shapes and colours [b, m,
    4] in patches."""
    b = rows.shape[0]
    x, y = rows[..., 1], rows[..., 2]
    inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)

    def spread(label: Tensor, cell_w: int, cell_h: int) -> Tensor:
        columns, lines = width // cell_w, height // cell_h
        index = (y / cell_h).long() * columns + (x / cell_w).long()
        index = torch.where(inside & (label > 0), index, columns * lines)
        grid = torch.zeros(b, columns * lines + 1, dtype=torch.long, device=rows.device)
        grid.scatter_(1, index, label.long())
        v, u = 32 // cell_h, 32 // cell_w
        return grid[:, :-1].view(b, height // 32, v, width // 32, u).transpose(2, 3).reshape(b, -1, v * u)

    return spread(labels[..., 0], 4, 8), spread(labels[..., 1], 16, 16), spread(labels[..., 2], 16, 16)


def main() -> None:
    """Largest difference between kernel and reference implementation over some scenes of every kind."""
    painter = Painter(torch.device("cuda"))
    for kind in KINDS:
        scenes = [make_scene(kind, EVAL, 448, 320, 0.9, seed) for seed in range(4)]
        marks = pack(scenes)
        ours = (
            painter(*(torch.from_numpy(t).cuda() for t in (marks.rows, marks.counts, marks.ground)), 448, 320)
            .cpu()
            .numpy()
        )
        reference: NDArray[np.uint8] = np.stack(
            [paint(marks.rows[i], marks.ground[i], 448, 320) for i in range(4)]
        )
        gap = np.abs(ours.astype(int) - reference.astype(int))
        print(
            f"{kind:12s} largest {gap.max():3d}  share of pixels off by more than 1: {(gap > 1).mean():.2e}"
        )


if __name__ == "__main__":
    main()
