"""System prompts by name: their tokens are those of every conversation with them, and their KV stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.builder import pinned_tokens
from saccade.engine.core import Engine
from saccade.errors import ConfigError
from saccade.inputs.processor import InputProcessor
from saccade.request import Request

SYSTEM = "The eye jumps to what matters and rests there. Say what is red, and say it in few words."


@pytest.fixture(scope="module")
def folder(family_folder: Callable[[str], Path]) -> Path:
    return family_folder("qwen3_vl")


def conversation(front: InputProcessor, name: str, words: str) -> Request:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words}]
    return front.prepare_chat(messages, SamplingParams(max_tokens=3, temperature=0), name)


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def test_pinned_tokens_are_the_common_prefix_of_conversations(folder: Path) -> None:
    (tokens,) = pinned_tokens(open_checkpoint(str(folder)), [SYSTEM])
    front = InputProcessor(open_checkpoint(str(folder)), 4096)
    for words in ("Where is the boat?", "x", "9"):
        prompt = conversation(front, "a", words).prompt
        assert list(prompt[: len(tokens)]) == tokens
    assert len(tokens) > len(front.tokenizer.encode(SYSTEM))


def test_pinned_blocks_are_never_evicted(folder: Path) -> None:
    front = InputProcessor(open_checkpoint(str(folder)), 4096)
    for pinned in ((SYSTEM,), ()):
        engine = Engine(
            EngineConfig(
                model=str(folder),
                device="cpu",
                block_size=4,
                num_blocks=60,
                max_model_len=140,
                pin_prefix=pinned,
            ),
            progress=False,
        )
        others = [
            front.prepare_prompt([7 + number] * 120, SamplingParams(max_tokens=9), f"o{number}")
            for number in range(4)
        ]
        for request in (conversation(front, "first", "Where?"), *others):
            engine.submit(request)
        finish(engine)
        before = engine.stats().prefix_hit_tokens
        engine.submit(conversation(front, "again", "Who?"))
        finish(engine)
        engine.check()
        found = engine.stats().prefix_hit_tokens - before
        (tokens,) = pinned_tokens(open_checkpoint(str(folder)), [SYSTEM])
        assert (found >= len(tokens) // 4 * 4) == bool(pinned)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pinned_prefix_bytes": 9}, r"\d+ tokens, \d+ KV blocks of \d+ bytes.* may pin 9"),
        ({"max_model_len": 240}, r"need \d+ KV blocks.* room for 0.* --max-model-len"),
        ({"prefix_caching": False}, "needs prefix_caching"),
    ],
)
def test_prefixes_that_do_not_fit_fail_the_start(folder: Path, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_model_len": 140, **options}
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model=str(folder), device="cpu", pin_prefix=(SYSTEM,), **given), progress=False)
