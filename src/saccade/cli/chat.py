"""A conversation in the terminal: pictures and a question in, the answer streamed out.

takes   an engine that is not started yet, pictures, perhaps a first question
gives   text on stdout; everything else goes to stderr
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.async_llm import AsyncEngine
from saccade.errors import RequestError
from saccade.sampling_params import SamplingParams

Message = dict[str, Any]


async def converse(
    engine: AsyncEngine, pictures: Sequence[Path], question: str | None, params: SamplingParams
) -> None:
    """Answer `question` and end; without one, read questions from the terminal until it is closed."""
    console = Console(stderr=True)
    with console.status("loading the model"):
        await engine.start()
    try:
        parts: list[Message] = [{"type": "image", "image": path} for path in pictures]
        if question is not None:
            await _answer(engine, [_asked(parts, question)], params)
            return
        console.print(f"{engine.info.model} on {engine.info.device}; end with Ctrl-D", highlight=False)
        history: list[Message] = []
        while (line := await _ask()) is not None:
            asked = _asked(parts, line)
            try:
                answer = await _answer(engine, [*history, asked], params)
            except RequestError as error:
                console.print(error.message, style="red", highlight=False)
                continue
            parts = []  # the pictures are in the history from now on
            history += [asked, {"role": "assistant", "content": answer}]
    finally:
        await engine.stop()


def _asked(parts: list[Message], text: str) -> Message:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def _ask() -> str | None:
    """The next line of the terminal; None at its end."""
    with contextlib.suppress(EOFError):
        return await asyncio.to_thread(input, "> ")
    return None


async def _answer(engine: AsyncEngine, messages: list[Message], params: SamplingParams) -> str:
    text = ""
    async for piece in engine.chat(messages, params):
        text += piece.text
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text
