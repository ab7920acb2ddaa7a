"""How a checkpoint writes reasoning and tool calls, and the parser of one answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from saccade.errors import ConfigError
from saccade.inputs.answer.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from saccade.inputs.answer.json_tool_parsers import (
    HermesToolParser,
    ListToolParser,
    LlamaToolParser,
    MistralToolParser,
)
from saccade.inputs.answer.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser
from saccade.inputs.answer.tagged_tool_parsers import GemmaToolParser, QwenXmlToolParser
from saccade.inputs.answer.tool_parser import Parameters, ToolParser
from saccade.inputs.tokenizer import Tokenizer

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen-xml": QwenXmlToolParser,
    "llama3": LlamaToolParser,
    "mistral": MistralToolParser,
    "gemma": GemmaToolParser,
}
# Text of a chat template that tells its format; the first match wins.
_TOOL_SIGNS = (
    ("<function=", "qwen-xml"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)
AUTO, NONE = "auto", "none"
Format = TypeVar("Format")


@dataclass(frozen=True)
class AnswerFormat:
    """The formats of a checkpoint; None where it has none or they are off."""

    reasoning: ReasoningFormat | None = None
    tool_parser: type[ToolParser] | None = None

    @classmethod
    def detect(
        cls, template: str | None, tokenizer: Tokenizer, reasoning: str = AUTO, tools: str = AUTO
    ) -> "AnswerFormat":
        """From the chat template and the vocabulary; an explicit name overrides."""
        return cls(_reasoning(template or "", tokenizer, reasoning), _tools(template or "", tools))

    def kept_markers(self, with_tools: bool) -> tuple[str, ...]:
        """Markers that must stay in the text although the vocabulary has them as special tokens."""
        markers = self.reasoning.markers if self.reasoning else ()
        return (*markers, *(self.tool_parser.control_markers if with_tools and self.tool_parser else ()))


def _reasoning(template: str, tokenizer: Tokenizer, name: str) -> ReasoningFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        return _named("reasoning_parser", name, REASONING_FORMATS)
    for one in REASONING_FORMATS.values():
        if one.end in template or tokenizer.id_of(one.end) is not None:
            return one
    return None


def _tools(template: str, name: str) -> type[ToolParser] | None:
    if name == NONE:
        return None
    if name != AUTO:
        return _named("tool_parser", name, TOOL_PARSERS)
    if "tools" not in template:
        return None
    return next((TOOL_PARSERS[parser] for sign, parser in _TOOL_SIGNS if sign in template), None)


def _named(option: str, name: str, known: Mapping[str, Format]) -> Format:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}; choose one of {', '.join((AUTO, NONE, *known))}")
    return known[name]


class AnswerParser:
    """One answer: reasoning first, then content and tool calls."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = None if parallel else 1

    def push(self, text: str) -> list[AnswerEvent]:
        return self._parse(text, False)

    def finish(self, text: str = "") -> list[AnswerEvent]:
        """The events of the last text and of what was held back."""
        return self._parse(text, True)

    def _parse(self, text: str, final: bool) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, final)
            if thought:
                events.append(ReasoningText(thought))
            if self._reasoning.finished:
                self._reasoning = None
        if self._tools is None:
            return [*events, ContentText(text)] if text else events
        if text:
            events += self._tools.push(text)
        if final:
            events += self._tools.finish()
        return events if self._most_calls is None else [one for one in events if self._wanted(one)]

    def _wanted(self, event: AnswerEvent) -> bool:
        """Without parallel calls the first one counts."""
        return not isinstance(event, ToolCallStart | ToolCallArguments) or event.index == 0


@dataclass(frozen=True)
class AnswerPlan:
    """How to parse the answers of one request."""

    format: AnswerFormat
    tools: Mapping[str, Parameters]
    forced_call: bool = False  # a grammar makes the answer a list of calls
    parallel: bool = True

    def parser(self, opened: bool) -> AnswerParser | None:
        """A parser for one answer, None if there is nothing to parse. `opened`: by the prompt."""
        reasoning = self.format.reasoning
        kind = ListToolParser if self.forced_call else self.format.tool_parser
        tools = kind(self.tools) if kind is not None and self.tools else None
        if reasoning is None and tools is None:
            return None
        return AnswerParser(
            None if reasoning is None else ReasoningParser(reasoning, opened), tools, parallel=self.parallel
        )


def tool_parameters(tools: Sequence[Mapping[str, object]]) -> dict[str, Parameters]:
    """The parameter schemas of OpenAI's tools, by name."""
    found: dict[str, Parameters] = {}
    for tool in tools:
        function = tool["function"]
        if isinstance(function, Mapping):
            found[str(function["name"])] = function.get("parameters") or {}
    return found
