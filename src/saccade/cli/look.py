"""`saccade look`: draws where a question looks in an image, and prints the plan."""

import asyncio
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from saccade.async_llm import AsyncEngine
from saccade.cli.options import (
    ENGINE_OPTIONS,
    MEDIA_OPTIONS,
    MODEL_OPTION,
    engine_config,
    media_limits,
    option,
    with_options,
)
from saccade.lod.preview import Preview
from saccade.lod.types import LodParams


@click.command("look")
@click.argument("image", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("question")
@MODEL_OPTION
@option("--visual-tokens", type=int, help="Budget of all views together. [default: half of full detail]")
@option("--out", type=click.Path(dir_okay=False, path_type=Path), help="[default: IMAGE.look.png]")
@option("--json/--no-json", "as_json", default=False, help="Print maps and plan as JSON.")
@with_options(ENGINE_OPTIONS, MEDIA_OPTIONS)
def command(
    image: Path,
    question: str,
    model: str,
    visual_tokens: int | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Draw where QUESTION looks in IMAGE, and what would be zoomed.

    \b
    Examples:
      saccade look receipt.png "What is the total?"
      saccade look page.png "When was it signed?" --visual-tokens 256 --json
    """
    config = engine_config(model, given)
    engine = AsyncEngine(config.model, media=media_limits(given), **config.options())
    preview = asyncio.run(_preview(engine, image, question, LodParams(budget=visual_tokens)))
    out = out or image.with_name(image.name + ".look.png")
    out.write_bytes(preview.png(0))
    click.echo(json.dumps(preview.values(png=False)) if as_json else _summary(preview))
    click.echo(f"drawn in {out}", err=True)


async def _preview(engine: AsyncEngine, image: Path, question: str, lod: LodParams) -> Preview:
    with Console(stderr=True).status("loading the model"):
        await engine.start()
    try:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        return await engine.look([{"role": "user", "content": parts}], lod=lod)
    finally:
        await engine.stop()


def _summary(preview: Preview) -> str:
    item, choice = preview.images[0], preview.zoomed.choices[0]
    rows, columns = item.view.token_grid
    lines = [f"the whole image in {rows}x{columns} tokens"]
    for region in choice.regions:
        x0, y0, x1, y1 = region.box
        grid = f"{region.grid[0]}x{region.grid[1]}"
        lines.append(f"zoom on ({x0}, {y0}) to ({x1}, {y1}) in {grid} tokens, relevance {region.score:.2f}")
    if choice.gated:
        lines.append(f"no zoom: {choice.gated}")
    share = preview.visual_tokens / max(preview.full_tokens, 1)
    lines.append(f"{preview.visual_tokens} of {preview.full_tokens} visual tokens ({share:.0%})")
    return "\n".join(lines)
