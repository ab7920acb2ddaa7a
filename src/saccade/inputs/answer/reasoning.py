"""Reasoning in an answer: text between two markers at its start, kept apart from the content."""

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.inputs.tokenizer import Tokenizer

PROMPT_TAIL = 8  # tokens at the end of a prompt that may open the reasoning


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start.strip(), self.end)

    def opened_by(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether the prompt ends inside the reasoning, as some chat templates make it."""
        tail = tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special=False)
        return tail.rstrip().endswith(self.start.rstrip())

    def count_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer, opened: bool) -> int:
        """Tokens of an answer up to the end of its reasoning, markers included."""
        if not opened:
            start = b"".join(tokenizer.token_bytes(token) for token in token_ids[:PROMPT_TAIL])
            if not start.lstrip().startswith(self.start.rstrip().encode()):
                return 0
        end_id = tokenizer.id_of(self.end)
        if end_id is not None:
            return token_ids.index(end_id) + 1 if end_id in token_ids else len(token_ids)
        spelled, end = b"", self.end.encode()
        for count, token in enumerate(token_ids, 1):
            spelled = spelled[-len(end) :] + tokenizer.token_bytes(token)
            if end in spelled:
                return count
        return len(token_ids)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
    )
}


def held_suffix(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may begin one of the markers."""
    longest = 0
    for marker in markers:
        most = min(len(marker) - 1, len(text))
        longest = max(longest, next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0))
    return longest


class ReasoningParser:
    """Splits text into reasoning and content. White space around the markers belongs to neither."""

    def __init__(self, format_: ReasoningFormat, opened: bool) -> None:
        self._start, self._end = format_.start, format_.end
        self._buffer = ""
        self._inside: bool | None = True if opened else None  # None: the answer has not begun
        self._at_edge = opened  # white space is dropped until the next text

    @property
    def finished(self) -> bool:
        """Whether all further text is content."""
        return self._inside is False and not self._at_edge

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """The reasoning and the content that `text` adds."""
        self._buffer += text
        if self._inside is None and not self._begin(final):
            return "", ""
        reasoning = self._take_reasoning(final) if self._inside else ""
        content = ""
        if self._inside is False:
            content, self._buffer = self._trim_edge(self._buffer), ""
        return reasoning, content

    def _begin(self, final: bool) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._start):
            self._buffer, self._inside, self._at_edge = stripped[len(self._start) :], True, True
        elif final or not self._start.startswith(stripped):
            self._inside = False
        return self._inside is not None

    def _take_reasoning(self, final: bool) -> str:
        found = self._buffer.find(self._end)
        if found >= 0:
            text, rest = self._buffer[:found].rstrip(), self._buffer[found + len(self._end) :]
            text = self._trim_edge(text)
            self._buffer, self._inside, self._at_edge = rest, False, True
            return text
        shown = len(self._buffer) if final else len(self._buffer) - held_suffix(self._buffer, [self._end])
        text = self._buffer[:shown].rstrip()  # white space may precede the marker
        self._buffer = "" if final else self._buffer[len(text) :]
        return self._trim_edge(text)

    def _trim_edge(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text
