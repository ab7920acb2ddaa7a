"""Parsers of tool calls that are not JSON: the XML of Qwen3.5 and Qwen3-Coder, and Gemma's."""

import json
import re
from collections.abc import Mapping
from typing import Any

from saccade.inputs.answer.events import dump_json
from saccade.inputs.answer.tool_parser import NAME, Parameters, ToolParser

_LITERALS = {"True": True, "False": False, "None": None}
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,128})>")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,128})>")
MAX_DEPTH = 32  # of values in a Gemma call


class QwenXmlToolParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`

    A parameter is passed on when it is complete. Its schema tells whether it is text or JSON.
    """

    start_markers = ("<tool_call>", "<function=")
    control_markers = ("<tool_call>", "</tool_call>")
    _tags = ("<parameter=", "</function>", "</tool_call>")

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        super().__init__(tools)
        self._name = ""
        self._keys = 0

    def _read_call(self, final: bool) -> bool:
        # The marker `<function=` is part of the call.
        prefix = "<function=" if self._raw.endswith("<function=") else ""
        text = prefix + self._buffer
        match = _FUNCTION.match(text)
        if match and NAME.fullmatch(match[1].strip()):
            self._name, self._keys = match[1].strip(), 0
            self._take(match.end() - len(prefix))
            self._start_call(self._name)
            self._emit_arguments("{")
            self._state = self._read_parameters
            return True
        body = text.lstrip()
        begins = "<function=".startswith(body) or (
            body.startswith("<function=") and re.fullmatch(r"[^>\n]{0,128}", body[10:]) is not None
        )
        return False if begins and not final else self._reject()

    def _read_parameters(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if body.startswith("<parameter="):
            return self._read_parameter(body, final)
        for tag in self._tags[1:]:
            if body.startswith(tag):
                self._emit_arguments("}")
                self._buffer = body if tag == "</tool_call>" else body[len(tag) :]
                self._state = self._end_call
                return True
        if not final and any(tag.startswith(body) for tag in self._tags):
            return False
        if body:  # text where only tags belong
            self._emit_arguments("}")
            self._state = self._read_content
            return True
        return False

    def _read_parameter(self, body: str, final: bool) -> bool:
        match = _PARAMETER.match(body)
        if match is None:
            if not final and re.fullmatch(r"<parameter=[^>\n]{0,128}", body):
                return False
            self._emit_arguments("}")
            self._state = self._read_content
            return True
        ends = [
            (at, one) for one in ("</parameter>", *self._tags) if (at := body.find(one, match.end())) >= 0
        ]
        if not ends and not final:
            return False
        at, tag = min(ends) if ends else (len(body), "")
        value = body[match.end() : at].removeprefix("\n").removesuffix("\n")
        text = self._encode(match[1].strip(), value)
        # A value that was cut off leaves the arguments incomplete, as OpenAI's do.
        self._emit_arguments(text if tag else text.removesuffix('"'))
        self._buffer = body[at + (len(tag) if tag == "</parameter>" else 0) :]
        return bool(tag)

    def _encode(self, key: str, value: str) -> str:
        schema = self._tools.get(self._name, {}).get("properties", {})
        schema = schema.get(key) if isinstance(schema, dict) else None
        separator = ", " if self._keys else ""
        self._keys += 1
        return f"{separator}{dump_json(key)}: {dump_json(_typed(value, schema))}"

    def _end_call(self, final: bool) -> bool:
        found = self._skip_marker("</tool_call>", final)
        if found is None:
            return False
        self._state = self._read_content
        return True


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given or ()) if isinstance(given, list) else set()
    for option in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(option)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string"} if all(isinstance(one, str) for one in schema["enum"]) else set()
    return {one for one in found if isinstance(one, str)}


def _typed(value: str, schema: Any) -> object:
    """The value a parameter's text stands for; text where the schema allows it."""
    types = _types(schema)
    if types == {"string"} or ("string" in types and value not in ("null", "None")):
        return value
    if value in _LITERALS:
        return _LITERALS[value]
    try:
        return json.loads(value, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return value


class GemmaToolParser(ToolParser):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, and FunctionGemma's older markers."""

    start_markers = ("<|tool_call>", "<start_function_call>")
    _ends = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}  # noqa: RUF012
    control_markers = (*_ends, *_ends.values(), '<|"|>', "<escape>")

    def _read_call(self, final: bool) -> bool:
        start = next(one for one in self.start_markers if self._raw.endswith(one))
        end = self._ends[start]
        at = self._buffer.find(end)
        if at < 0 and not final:
            return False
        body = self._buffer if at < 0 else self._buffer[:at]
        call = parse_gemma_call(body)
        if call is None:
            return self._reject()
        self._take(len(body) + (len(end) if at >= 0 else 0))
        self._start_call(call[0])
        self._emit_arguments(call[1])
        self._state = self._read_content
        return True


class GemmaSyntaxError(ValueError):
    """The text is no call."""


def parse_gemma_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text); None if it is no call."""
    match = re.match(r"\s*call:\s*([A-Za-z0-9_.\-/]{1,128})\s*(?=\{)", text)
    if match is None:
        return None
    reader = _GemmaReader(text, match.end())
    try:
        value = reader.read_value(0)
    except GemmaSyntaxError:
        return None
    if text[reader.at :].strip():
        return None
    return match[1], dump_json(value)


class _GemmaReader:
    """JSON with bare keys, whose strings are between quote tokens and have no escapes."""

    quotes = ('<|"|>', "<escape>", '"')

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def read_value(self, depth: int) -> Any:
        self._skip_space()
        if depth > MAX_DEPTH:
            raise GemmaSyntaxError
        if self._skip("{"):
            return self._read_object(depth)
        if self._skip("["):
            return self._read_list(depth)
        text = self._read_string()
        if text is not None:
            return text
        match = re.compile(r"[^,}\]]*").match(self._text, self.at)
        word = match[0] if match else ""
        self.at += len(word)
        try:
            return json.loads(word, parse_constant=lambda name: name)
        except ValueError:
            if not word.strip():
                raise GemmaSyntaxError from None
            return _LITERALS.get(word.strip(), word.strip())

    def _read_object(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self._skip("}"):
            if result and not self._skip(","):
                raise GemmaSyntaxError
            self._skip_space()
            key = self._read_string()
            if key is None:
                match = re.compile(r"[^:{}\[\],]+").match(self._text, self.at)
                if match is None:
                    raise GemmaSyntaxError
                key = match[0].strip()
                self.at = match.end()
            if not self._skip(":"):
                raise GemmaSyntaxError
            result[key] = self.read_value(depth + 1)
        return result

    def _read_list(self, depth: int) -> list[Any]:
        result: list[Any] = []
        while not self._skip("]"):
            if result and not self._skip(","):
                raise GemmaSyntaxError
            result.append(self.read_value(depth + 1))
        return result

    def _read_string(self) -> str | None:
        for quote in self.quotes:
            if self._text.startswith(quote, self.at):
                begin = self.at + len(quote)
                end = self._text.find(quote, begin)
                if end < 0:
                    raise GemmaSyntaxError
                self.at = end + len(quote)
                return self._text[begin:end]
        return None

    def _skip_space(self) -> None:
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1

    def _skip(self, sign: str) -> bool:
        self._skip_space()
        if self._text.startswith(sign, self.at):
            self.at += 1
            return True
        return False
