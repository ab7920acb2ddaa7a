"""A first look on a GPU: the kernel against the reference implementation, images per second, steps per
second, a contact sheet.

python -m training.probe
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from . import raster
from .data import Spec, build
from .model import Heads, Model, compile_parts, initialise
from .optim import Optimiser
from .scenes.generate import KINDS as SCENE_KINDS
from .shape import Shape
from .steps import losses, to_batch

KINDS = dict.fromkeys(SCENE_KINDS, 1.0)
SPECS = (
    Spec(224, 224, 384, 192, 0.3, KINDS),
    Spec(448, 448, 136, 256, 0.9, KINDS),
    Spec(896, 896, 32, 256, 0.9, KINDS),
    Spec(896, 896, 48, 512, 0.9, KINDS, True, (448, 448), (256, 256), 4, 196),
    Spec(1344, 1024, 16, 256, 0.9, KINDS),
)


def main() -> None:
    out = Path(os.environ.get("OUT", "."))
    device = torch.device("cuda")
    raster.main()
    painter = raster.Painter(device)
    shape = Shape()
    model, heads = Model(shape), Heads(shape, 11, 12)
    initialise(model, shape.depth)
    initialise(heads, shape.depth)
    model.to(device)
    heads.to(device)
    optimiser = Optimiser(model, heads, 0.004, 0.003)
    compile_parts()
    for number, spec in enumerate(SPECS):
        begun = time.monotonic()
        data = {k: torch.from_numpy(v).to(device) for k, v in build(spec, 1).items()}
        made = time.monotonic() - begun

        def draw(spec: Spec = spec, data: dict[str, torch.Tensor] = data) -> object:
            return to_batch(spec, data, painter)

        def step(spec: Spec = spec, data: dict[str, torch.Tensor] = data) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = losses(spec, data, to_batch(spec, data, painter), model, heads, 0.5)
            loss.total.backward()
            for p in (*model.parameters(), *heads.parameters()):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            optimiser.step(0.1)

        line = f"{spec.width}x{spec.height} batch {spec.batch} views {spec.views}: build {made:.2f} s"
        for name, work, times in (("draw", draw, 5), ("step", step, 4)):
            begun = time.monotonic()
            work()
            work()
            torch.cuda.synchronize()
            first = time.monotonic() - begun
            begun = time.monotonic()
            for _ in range(times):
                work()
            torch.cuda.synchronize()
            took = (time.monotonic() - begun) / times
            line += (
                f"; {name} first {first:.1f} s, then {took * 1e3:.1f} ms = {spec.batch / took:.0f} images/s"
            )
        print(line, f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        batch = to_batch(spec, data, painter)
        if batch.crops is not None:
            sheet = torch.cat([torch.cat(list(row), 1) for row in batch.crops[:4]], 0)
            Image.fromarray(sheet.cpu().numpy()).save(out / "crops.png")
        tiles = batch.images[:12].cpu().numpy()
        Image.fromarray(
            np.concatenate([np.concatenate(list(tiles[i : i + 4]), 1) for i in (0, 4, 8)], 0)
        ).resize((1024, 768)).save(out / f"sheet{number}.png")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        spec = SPECS[1]
        data = {k: torch.from_numpy(v).to(device) for k, v in build(spec, 1).items()}
        step(spec, data)
        torch.cuda.synchronize()
    print(
        profile.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60)[:6000]
    )


if __name__ == "__main__":
    main()
