"""Reasoning and tool calls found in answers, whole or split anywhere."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.inputs.answer.answer_format import TOOL_PARSERS, AnswerParser
from saccade.inputs.answer.events import ParsedAnswer
from saccade.inputs.answer.json_tool_parsers import ListToolParser
from saccade.inputs.answer.reasoning import REASONING_FORMATS, ReasoningParser
from saccade.inputs.answer.tool_parser import ToolParser

TOOLS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "where": {"type": "string"},
            "count": {"type": "integer"},
            "deep": {"type": "object"},
            "maybe": {"type": ["string", "null"]},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
PARSERS: dict[str, type[ToolParser]] = {**TOOL_PARSERS, "list": ListToolParser}
Result = tuple[str, str, list[tuple[str, str]]]


def parse(kind: str, pieces: Sequence[str], reasoning: str | None = None, opened: bool = False) -> Result:
    think = None if reasoning is None else ReasoningParser(REASONING_FORMATS[reasoning], opened)
    parser = AnswerParser(think, PARSERS[kind](TOOLS))
    events = [event for piece in pieces for event in parser.push(piece)]
    answer = ParsedAnswer.join([*events, *parser.finish()])
    assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


CALLS = [
    ("look", {"where": 'a "b" } ] \\ é\n<x>', "count": 3, "deep": {"k": [1, {"z": None}]}}),
    ("stop", {}),
]


def hermes(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def xml(name: str, arguments: dict[str, Any]) -> str:
    body = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


WRITTEN = {
    "hermes": "\n".join(hermes(*call) for call in CALLS),
    "qwen-xml": "\n".join(xml(*call) for call in CALLS),
    "llama3": "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in CALLS),
    "mistral": "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": given} for name, given in CALLS]),
    "gemma": "".join(f"<|tool_call>call:{name}{gemma_value(given)}<tool_call|>" for name, given in CALLS),
    "list": json.dumps([{"name": name, "arguments": given} for name, given in CALLS]),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_of_each_format_are_read_at_every_split(kind: str) -> None:
    before = "" if kind in ("llama3", "list") else "Let me see.\n\n"
    text = before + WRITTEN[kind]
    _, content, calls = parse(kind, [text])
    assert content == before.rstrip()
    assert [(name, json.loads(given)) for name, given in calls] == CALLS
    for at in range(len(text) + 1):
        assert parse(kind, [text[:at], text[at:]]) == ("", content, calls)
    assert parse(kind, list(text)) == ("", content, calls)


def test_newer_mistral_calls_and_python_tag() -> None:
    assert parse("mistral", ['Hm.[TOOL_CALLS]look[ARGS]{"count": 1}[TOOL_CALLS]stop{}']) == (
        "",
        "Hm.",
        [("look", '{"count": 1}'), ("stop", "{}")],
    )
    assert parse("llama3", ['<|python_tag|>{"name": "stop", "parameters": {}}'])[2] == [("stop", "{}")]
    assert parse("gemma", ["<start_function_call>call:look{where:<escape>a,b<escape>}<end_function_call>"])[
        2
    ] == [("look", '{"where": "a,b"}')]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", "<tool_call>\nnot json\n</tool_call> and on"),
        ("hermes", '<tool_call>{"name": "look", "arguments": 3}</tool_call>'),
        ("hermes", 'say <tool_call> {"name": }'),
        ("qwen-xml", "<tool_call>\n<fun"),
        ("qwen-xml", "use <function=a b> here"),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"total": 3, "name": "look"}'),
        ("llama3", '{"name": "look"'),
        ("llama3", "plain { text }"),
        ("mistral", "[TOOL_CALLS] what?"),
        ("mistral", '[TOOL_CALLS][{"name": 3}]'),
        ("gemma", '<|tool_call>call:look{where:<|"|>open}<tool_call|>'),
        ("list", "no list"),
    ],
)
def test_malformed_calls_stay_content(kind: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(kind, pieces) == ("", text, [])


def test_a_cut_off_call_keeps_its_partial_arguments() -> None:
    assert parse("hermes", ['<tool_call>{"name": "look", "arguments": {"where": "a b'])[2] == [
        ("look", '{"where": "a b')
    ]
    assert parse("qwen-xml", ["<tool_call><function=look><parameter=where>\na b"])[2] == [
        ("look", '{"where": "a b')
    ]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = AnswerParser(None, PARSERS["hermes"](TOOLS))
    text = '<tool_call>{"name": "look", "arguments": {"where": "'
    first = parser.push(text)
    assert [type(event).__name__ for event in first] == ["ToolCallStart", "ToolCallArguments"]
    assert [type(event).__name__ for event in parser.push("far")] == ["ToolCallArguments"]


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    parser = AnswerParser(None, PARSERS["hermes"](TOOLS), parallel=False)
    answer = ParsedAnswer.join([*parser.push(WRITTEN["hermes"]), *parser.finish()])
    assert [call.name for call in answer.tool_calls] == ["look"]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_kept_apart_at_every_split(name: str) -> None:
    one = REASONING_FORMATS[name]
    closed = f"Because </ of\n it.\n{one.end}\n\nAnswer "
    for opened, text in ((True, "\n" + closed), (False, f"\n{one.start}\n{closed}")):
        for at in range(len(text) + 1):
            found = parse("hermes", [text[:at], text[at:]], name, opened)
            assert found == ("Because </ of\n it.", "Answer ", []), (opened, at)
    assert parse("hermes", ["never ends"], name, True) == ("never ends", "", [])
    assert parse("hermes", ["no reasoning"], name) == ("", "no reasoning", [])


def test_a_call_inside_reasoning_is_reasoning() -> None:
    text = f"<think>maybe {hermes('stop', {})}</think>{hermes('look', {})}"
    assert parse("hermes", list(text), "think") == (f"maybe {hermes('stop', {})}", "", [("look", "{}")])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=where>", "</parameter>"),
    *(
        "<parameter=count>",
        '{"name": "look", "arguments": {',
        '"where": "x',
        '"}',
        "}}",
        "}",
        "[",
        "]",
        ",",
        ";",
    ),
    *("[TOOL_CALLS]", "look[ARGS]{}", "<|tool_call>call:look{", '<|"|>', "<tool_call|>", "<|python_tag|>"),
    *(
        '{"name": "stop", "parameters": {}}',
        "<think>",
        "</think>",
        "[THINK]",
        "\n",
        " ",
        "a",
        "é",
        "\\",
        '"',
        "<",
    ),
    *(
        "<start_function_call>",
        "<end_function_call>",
        "3",
        "call:stop{}",
        '"type": "function", ',
        "[CALL_ID]a1",
    ),
]


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted(PARSERS)),
    parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14),
    opened=st.booleans(),
    thinks=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_text_gives_the_same_answer_however_it_is_split(
    kind: str, parts: list[str], opened: bool, thinks: bool, cuts: list[int]
) -> None:
    text = "".join(parts)
    reasoning = "think" if thinks else None
    whole = parse(kind, [text], reasoning, opened)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(kind, pieces, reasoning, opened) == whole
    assert parse(kind, list(text), reasoning, opened) == whole
    if not whole[2] and not thinks:
        assert whole[1] == text  # without a call every character is content
