"""`saccade look`: where a question looks in a picture, drawn.

takes   an engine that is not started yet, a picture, a question
gives   an annotated picture in a file; the plan on stdout
"""

import json
from pathlib import Path

import click
from rich.console import Console

from saccade.async_llm import AsyncEngine
from saccade.lod.preview import Preview
from saccade.lod.types import LodParams


async def look(
    engine: AsyncEngine, picture: Path, question: str, lod: LodParams, out: Path, *, as_json: bool
) -> None:
    with Console(stderr=True).status("loading the model"):
        await engine.start()
    try:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        preview = await engine.look([{"role": "user", "content": parts}], lod=lod)
    finally:
        await engine.stop()
    out.write_bytes(preview.png(0))
    click.echo(json.dumps(preview.values(png=False)) if as_json else _told(preview))
    click.echo(f"drawn in {out}", err=True)


def _told(preview: Preview) -> str:
    item, choice = preview.pictures[0], preview.zoomed.choices[0]
    rows, columns = item.view.token_grid
    lines = [f"the whole picture in {rows}x{columns} tokens"]
    for region in choice.regions:
        x0, y0, x1, y1 = region.box
        grid = f"{region.grid[0]}x{region.grid[1]}"
        lines.append(f"zoom on ({x0}, {y0}) to ({x1}, {y1}) in {grid} tokens, relevance {region.score:.2f}")
    if choice.gated:
        lines.append(f"no zoom: {choice.gated}")
    share = preview.visual_tokens / max(preview.full_tokens, 1)
    lines.append(f"{preview.visual_tokens} of {preview.full_tokens} visual tokens ({share:.0%})")
    return "\n".join(lines)
