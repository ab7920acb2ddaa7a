"""Prompts that cannot fit, words the model does not have, ids kept in every way: refused or taken early."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.checkpoint import open_checkpoint
from saccade.errors import ContextTooLong, InvalidValue
from saccade.inputs.processor import InputProcessor
from saccade.inputs.tokenizer import Tokenizer
from tests.inputs.test_processor import ASK
from tests.inputs.tiny_tokenizer import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def input_processor(folder: Path) -> Iterator[InputProcessor]:
    one = InputProcessor(open_checkpoint(str(folder)), 2048)
    yield one
    one.close()


def test_a_text_that_cannot_fit_is_not_tokenised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = InputProcessor(open_checkpoint(str(folder)), 40)
    most = 40 * one.tokenizer.longest

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("tokenised in vain")

    for name in ("encode", "encode_plain", "split_control"):
        monkeypatch.setattr(Tokenizer, name, refuse)
    for text in ("a" * (most + 1), "é" * (most // 2 + 1), "|" * (most + 1)):
        told = f"{len(text.encode())} bytes.* 40 tokens.*more than {most}"
        with pytest.raises(ContextTooLong, match=told) as caught:
            one.prepare_prompt(text, ASK, "r")
        assert caught.value.param == "prompt"
        for content in (text, [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]):
            with pytest.raises(ContextTooLong, match=told) as caught:
                one.prepare_chat([{"role": "user", "content": content}], ASK, "r")
            assert caught.value.param == "messages"


def test_the_byte_limit_allows_the_longest_tokens(folder: Path) -> None:
    one = InputProcessor(open_checkpoint(str(folder)), 41)
    words = (one.tokenizer.token_bytes(index) for index in range(one.tokenizer.vocab_size))
    longest = max(words, key=len).decode()
    assert len(one.prepare_prompt(longest * 40, ASK, "r", trusted=True).prompt) == 40


def test_tokens_without_an_embedding_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "tokenizer.json"
    value = json.loads(path.read_text())
    beyond = open_checkpoint(str(tmp_path)).vocab_size
    have = max(token["id"] for token in value["added_tokens"]) + 1
    value["added_tokens"] += [
        {**value["added_tokens"][0], "id": index, "content": f"<tag{index}>", "special": False}
        for index in range(have, beyond + 1)
    ]
    path.write_text(json.dumps(value))
    one = InputProcessor(open_checkpoint(str(tmp_path)), 2048)
    one.prepare_prompt(f"a <tag{beyond - 1}>", ASK, "r")
    with pytest.raises(InvalidValue, match=f"<tag{beyond}>.*0 to {beyond - 1}") as caught:
        one.prepare_prompt(f"a <tag{beyond}>", ASK, "r")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidValue, match=f"<tag{beyond}>") as caught:
        one.prepare_chat([{"role": "user", "content": f"<tag{beyond}>"}], ASK, "r")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "ids", [np.array([3, 4]), [np.int64(3), np.int32(4)], (3, 4), np.array([3, 4], np.uint8)]
)
def test_token_ids_may_be_lists_tuples_or_arrays(input_processor: InputProcessor, ids: Any) -> None:
    prompt = input_processor.prepare_prompt(ids, ASK, "r").prompt
    assert prompt == (3, 4)
    assert all(type(token) is int for token in prompt)


@pytest.mark.parametrize(
    "ids", [np.array([[3, 4]]), np.array([3.0]), 7, None, b"ab", {"a": 1}, [np.array([3])]]
)
def test_a_prompt_that_is_not_a_list_of_ids_is_refused(input_processor: InputProcessor, ids: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        input_processor.prepare_prompt(ids, ASK, "r")
    assert caught.value.param == "prompt"
