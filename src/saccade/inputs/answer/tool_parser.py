"""Tool calls in an answer: the base of the parsers of each format, and a scanner for JSON text.

A parser decides only what more text cannot change, so its result does not depend on how the text was split.
Text that is no valid call stays content. A call that breaks after its arguments began keeps what was written
as arguments. Nothing is dropped but the format's own markers and white space next to a call.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from saccade.inputs.answer.events import (
    AnswerEvent,
    ContentText,
    ToolCallArguments,
    ToolCallStart,
    dump_json,
    make_call_id,
)
from saccade.inputs.answer.reasoning import held_suffix

Parameters = Mapping[str, Any]  # JSON schemas of a tool's parameters
NAME = re.compile(r"[A-Za-z0-9_.\-/:]{1,128}")
# A call object up to its arguments. The name has no markup, so that no marker can be inside.
CALL_PREFIX = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([A-Za-z0-9_.\-/:]{1,128})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonScanner:
    """Finds where a JSON object or list ends, however its text is split."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """Characters of `text` that belong to the value."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return position + 1
        return len(text)


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call object; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON text inside JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return name, dump_json(arguments)


class ToolParser(ABC):
    """One answer. `tools` has the parameters of each tool by name."""

    start_markers: ClassVar[tuple[str, ...]] = ()
    control_markers: ClassVar[tuple[str, ...]] = ()  # tokens the detokenizer must not leave out
    id_length: ClassVar[int | None] = None

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        self._tools = tools
        self._buffer = ""
        self._events: list[AnswerEvent] = []
        self._calls = 0
        self._after_call = False  # white space is dropped until the next text
        self._raw = ""  # consumed text of a possible call, which becomes content if it is none
        self._scanner = JsonScanner()
        self._undecided: tuple[JsonScanner, int] | None = None  # of an object whose end is not known yet
        self._state: Callable[[bool], bool] = self._read_content

    def push(self, text: str) -> list[AnswerEvent]:
        self._buffer += text
        return self._run(False)

    def finish(self) -> list[AnswerEvent]:
        events = self._run(True)
        self._emit_content(self._raw + self._buffer)
        return [*events, *self._events]

    def _run(self, final: bool) -> list[AnswerEvent]:
        while self._buffer and self._state(final):
            pass
        events, self._events = self._events, []
        return events

    # --- states: each returns whether it made progress; with `final` no more text comes ------------------

    def _read_content(self, final: bool) -> bool:
        found = [(at, one) for one in self.start_markers if (at := self._buffer.find(one)) >= 0]
        if found:
            at, marker = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            before = self._buffer[:at]
            kept = before.rstrip()
            self._emit_content(kept)
            self._raw = before[len(kept) :] + marker
            self._buffer = self._buffer[at + len(marker) :]
            self._state = self._read_call
            return True
        shown = self._buffer
        if not final:
            shown = shown[: len(shown) - held_suffix(shown, self.start_markers)].rstrip()
        self._emit_content(shown)
        self._buffer = self._buffer[len(shown) :]
        return False

    @abstractmethod
    def _read_call(self, final: bool) -> bool:
        """After a start marker."""

    def _read_arguments(self, final: bool) -> bool:
        """The arguments of a call object, passed on as they come."""
        count = self._scanner.feed(self._buffer)
        self._emit_arguments(self._take(count))
        if self._scanner.ended:
            self._state = self._close_object
        return self._scanner.ended

    def _close_object(self, final: bool) -> bool:
        """The end of the object around the arguments; further keys of it are dropped."""
        self._buffer = self._buffer.lstrip()
        if self._buffer[:1] in ("}", ","):
            self._scanner = JsonScanner(depth=1)
            self._state = self._skip_object
            return True
        self._state = self._end_call
        return bool(self._buffer)

    def _skip_object(self, final: bool) -> bool:
        self._take(self._scanner.feed(self._buffer))
        if self._scanner.ended:
            self._state = self._end_call
        return self._scanner.ended

    def _end_call(self, final: bool) -> bool:
        """What follows a call."""
        self._state = self._read_content
        return True

    # --- steps ---------------------------------------------------------------------------------------------

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _emit_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if text:
            self._events.append(ContentText(text))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._calls - 1, text))

    def _start_call(self, name: str) -> None:
        self._raw, self._undecided = "", None
        self._after_call = True
        self._events.append(ToolCallStart(self._calls, make_call_id(self.id_length), name))
        self._calls += 1

    def _reject(self) -> bool:
        """What was consumed since the marker is content."""
        self._emit_content(self._raw)
        self._raw, self._undecided = "", None
        self._state = self._read_content
        return True

    def _read_object(self, final: bool, *, known_only: bool = False) -> bool | None:
        """A call object at the start of the buffer; None if it is not decided yet, False if it is none."""
        prefix = CALL_PREFIX.match(self._buffer)
        if prefix:
            if known_only and prefix[1] not in self._tools:
                return False
            self._start_call(prefix[1])
            self._take(prefix.end())
            self._scanner = JsonScanner()
            self._state = self._read_arguments
            return True
        body = self._buffer.lstrip()
        if body[:1] != "{":
            return None if not body and not final else False
        scanner, count = self._undecided or (JsonScanner(), 0)
        count += scanner.feed(body[count:])  # only what is new: long objects come in many pieces
        if not scanner.ended:
            self._undecided = (scanner, count)
            return False if final else None
        call = parse_call(body[:count])
        if call is None or (known_only and call[0] not in self._tools):
            return False
        self._buffer = body[count:]
        self._start_call(call[0])
        self._emit_arguments(call[1])
        self._state = self._end_call
        return True

    def _skip_marker(self, marker: str, final: bool) -> bool | None:
        """Whether the buffer begins with `marker`, which is consumed; None if that is not decided yet."""
        body = self._buffer.lstrip()
        if body.startswith(marker):
            self._buffer = body[len(marker) :]
            return True
        return None if not final and marker.startswith(body) else False
