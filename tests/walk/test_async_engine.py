"""AsyncEngine: concurrent streams, early closing, errors that affect only their request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from saccade import LLM, AsyncEngine, SamplingParams
from saccade.errors import EngineDied, InvalidValue
from tests.parity.oracle import picture

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture
async def engine(vl_folder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(str(vl_folder), device="cpu", num_blocks=256) as started:
        yield started


async def text(engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY) -> str:
    return "".join([piece.text async for piece in engine.generate(prompt, params)])


async def test_streams_at_once_equal_the_library(engine: AsyncEngine, vl_folder: Path) -> None:
    prompts = ["The eye jumps", "How many boats", "a", "Read the text on the sign"]
    llm = LLM(str(vl_folder), device="cpu", num_blocks=256, progress=False)
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    assert await asyncio.gather(*(text(engine, prompt) for prompt in prompts)) == expected

    content = [{"type": "image", "image": picture(60, 60, 4)}, {"type": "text", "text": "What?"}]
    conversation = [{"role": "user", "content": content}]
    streamed = "".join([piece.text async for piece in engine.chat(conversation, GREEDY)])
    assert streamed == llm.chat(conversation, GREEDY)[0].outputs[0].text

    with pytest.raises(InvalidValue):
        await text(engine, "")
    stream = engine.generate("The eye", SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    assert await text(engine, prompts[0]) == expected[0]


async def test_an_engine_must_be_started(vl_folder: Path) -> None:
    with pytest.raises(EngineDied, match="not been started"):
        AsyncEngine(str(vl_folder)).generate("hello")
