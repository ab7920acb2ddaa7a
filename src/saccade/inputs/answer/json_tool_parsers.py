"""Parsers of tool calls that are JSON objects: Hermes and Qwen, Mistral, Llama 3, and a plain list."""

import re
from collections.abc import Mapping

from saccade.inputs.answer.tool_parser import JsonScanner, Parameters, ToolParser

_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]{0,32})"')
_CALL_KEYS = frozenset(("name", "type", "function", "parameters", "arguments"))
_NAMED_CALL = re.compile(
    r"\s*([A-Za-z0-9_.\-/:]{1,128})(?:\[CALL_ID\]([A-Za-z0-9]{1,32}))?(?:\[ARGS\])?\s*(?=\{)"
)
_NAME_BEGINS = re.compile(r"\s*[A-Za-z0-9_.\-/:]{0,128}(?:\[[A-Za-z0-9_\]\[]{0,48})?\s*")


class HermesToolParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    start_markers = ("<tool_call>",)
    control_markers = ("<tool_call>", "</tool_call>")
    _end = "</tool_call>"

    def _read_call(self, final: bool) -> bool:
        found = self._read_object(final)
        if found is not None:
            return found or self._reject()
        # Unbalanced JSON before the end or before another call.
        ends = (self._end, *self.start_markers)
        if final or any(one in self._buffer for one in ends):
            return self._reject()
        return False

    def _end_call(self, final: bool) -> bool:
        found = self._skip_marker(self._end, final)
        if found is None:
            return False
        self._state = self._read_content
        return True


class ListToolParser(ToolParser):
    """`[{"name": ..., "arguments": {...}}, ...]`: what the grammar of a required call generates."""

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        super().__init__(tools)
        self._state = self._read_call

    def _read_call(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if body[0] != "[":
            return self._reject()
        self._raw += self._buffer[: len(self._buffer) - len(body) + 1]
        self._buffer = body[1:]
        self._state = self._read_item
        return True

    def _read_item(self, final: bool) -> bool:
        found = self._read_object(final)
        if found is None:
            return self._reject() if final else False
        return found or self._reject()

    def _end_call(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        separator = self._buffer[0]
        if separator in ",]":
            self._buffer = self._buffer[1:]
        self._state = self._read_item if separator == "," else self._read_content
        return True


class MistralToolParser(ListToolParser):
    """`[TOOL_CALLS][{...}, ...]`, and of newer models `[TOOL_CALLS]name[ARGS]{...}`."""

    start_markers = ("[TOOL_CALLS]",)
    control_markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    id_length = 9

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        super().__init__(tools)
        self._state = self._read_content
        self._named = False

    def _read_call(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return self._reject() if final else False
        if body[0] == "[":
            return super()._read_call(final)
        match = _NAMED_CALL.match(self._buffer)
        if match:
            self._start_call(match[1])
            self._take(match.end())
            self._named = True
            self._scanner = JsonScanner()
            self._state = self._read_arguments
            return True
        undecided = _NAME_BEGINS.fullmatch(self._buffer) is not None
        return False if undecided and not final else self._reject()

    def _close_object(self, final: bool) -> bool:
        if not self._named:
            return super()._close_object(final)
        self._named = False
        self._state = self._read_content
        return True


class LlamaToolParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`.

    The object has no marker of its own, so it is a call only if it names a tool of the request.
    """

    control_markers = ("<|python_tag|>",)

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        super().__init__(tools)
        self._state = self._read_call

    def _read_call(self, final: bool) -> bool:
        marked = self._skip_marker(self.control_markers[0], final) if not self._raw else False
        if marked is None:
            return False
        if marked:
            self._raw = self.control_markers[0]
            return True
        body = self._buffer.lstrip()
        if not body:
            return False
        first_key = _FIRST_KEY.match(self._buffer)
        if body[0] != "{" or (first_key and first_key[1] not in _CALL_KEYS):
            return self._reject()
        found = self._read_object(final, known_only=True)
        if found is None:
            # The first key of any object closes soon; anything else is no call.
            undecided = first_key is not None or re.fullmatch(r'\s*\{\s*(?:"[^"\\]{0,32})?', self._buffer)
            return False if undecided and not final else self._reject()
        return found or self._reject()

    def _end_call(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if body[0] in ";," or body[0] in "{<":
            self._raw = self._buffer[: len(self._buffer) - len(body)]
            if body[0] in ";,":
                self._raw += body[0]
                body = body[1:]
            self._buffer = body
            self._state = self._read_call
            return True
        self._state = self._read_content
        return True
