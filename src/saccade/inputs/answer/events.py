"""What an answer consists of: reasoning, content and tool calls, as they become known."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    text: str


class ContentText(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next characters of the arguments, which are JSON text."""

    index: int
    text: str


AnswerEvent = ReasoningText | ContentText | ToolCallStart | ToolCallArguments


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def join(cls, events: Iterable[AnswerEvent]) -> "ParsedAnswer":
        answer = cls()
        reasoning, content = [], []
        for event in events:
            if isinstance(event, ReasoningText):
                reasoning.append(event.text)
            elif isinstance(event, ContentText):
                content.append(event.text)
            elif isinstance(event, ToolCallStart):
                answer.tool_calls.append(ToolCall(event.id, event.name))
            else:
                answer.tool_calls[event.index].arguments += event.text
        answer.reasoning, answer.content = "".join(reasoning), "".join(content)
        return answer


def make_call_id(length: int | None = None) -> str:
    """A new id of a tool call; Mistral's templates take 9 letters and digits only."""
    return f"call_{uuid.uuid4().hex[:24]}" if length is None else uuid.uuid4().hex[:length]


def dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
