"""`saccade chat`: a conversation about images in the terminal. Answers go to stdout, the rest to stderr."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
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
from saccade.errors import RequestError
from saccade.sampling_params import SamplingParams

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MessageDict = dict[str, Any]


@click.command("chat")
@click.argument("images", nargs=-1, metavar="[IMAGE]... [QUESTION]")
@MODEL_OPTION
@option("--max-tokens", type=int, default=256, help="Longest answer in tokens.")
@option("--temperature", type=float, default=0.0, help="0 is greedy.")
@with_options(ENGINE_OPTIONS, MEDIA_OPTIONS)
def command(images: tuple[str, ...], model: str, max_tokens: int, temperature: float, **given: Any) -> None:
    """Ask about images in the terminal. Without a QUESTION, a conversation begins.

    Arguments that are files are images; the last one that is not is the question.

    \b
    Examples:
      saccade chat receipt.png "What is the total?"
      saccade chat left.jpg right.jpg
    """
    config = engine_config(model, given)
    files, question = split_question(images)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine = AsyncEngine(config.model, media=media_limits(given), **config.options())
    asyncio.run(_converse(engine, files, question, params))


def split_question(arguments: tuple[str, ...]) -> tuple[list[Path], str | None]:
    """The image files, and the question if the last argument is not a file."""
    question = None
    if arguments and not Path(arguments[-1]).is_file():
        *rest, question = arguments
        arguments = tuple(rest)
    if question is not None and not arguments and Path(question).suffix.lower() in IMAGE_SUFFIXES:
        raise click.UsageError(f"there is no file {question!r}")
    missing = [name for name in arguments if not Path(name).is_file()]
    if missing:
        raise click.UsageError(f"there is no file {missing[0]!r}; put the question last, in quotes")
    return [Path(name) for name in arguments], question


async def _converse(
    engine: AsyncEngine, images: Sequence[Path], question: str | None, params: SamplingParams
) -> None:
    """Answer `question`; without one, read questions from the terminal until end of file."""
    console = Console(stderr=True)
    with console.status("loading the model"):
        await engine.start()
    try:
        parts: list[MessageDict] = [{"type": "image", "image": path} for path in images]
        if question is not None:
            await _print_answer(engine, [_user_message(parts, question)], params)
            return
        console.print(f"{engine.info.model} on {engine.info.device}; end with Ctrl-D", highlight=False)
        history: list[MessageDict] = []
        while (line := await _read_line()) is not None:
            message = _user_message(parts, line)
            try:
                answer = await _print_answer(engine, [*history, message], params)
            except RequestError as error:
                console.print(error.message, style="red", highlight=False)
                continue
            parts = []  # the images are part of the history now
            history += [message, {"role": "assistant", "content": answer}]
    finally:
        await engine.stop()


def _user_message(parts: list[MessageDict], text: str) -> MessageDict:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def _read_line() -> str | None:
    with contextlib.suppress(EOFError):
        return await asyncio.to_thread(input, "> ")
    return None


async def _print_answer(engine: AsyncEngine, messages: list[MessageDict], params: SamplingParams) -> str:
    text = ""
    async for delta in engine.chat(messages, params):
        text += delta.text
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text
