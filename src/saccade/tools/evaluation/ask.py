"""Asks an engine the set's questions at one or several levels of detail.

takes   chunks of examples, token limits
gives   one `Outcome` per question and level, and the conversation each one was
never   asks the same thing twice: levels that leave a picture as it is share one answer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.inputs.image_processor import ImageProcessing
from saccade.llm import LLM, Output
from saccade.request import Pixels
from saccade.sampling_params import SamplingParams
from saccade.tools.evaluation.question_set import Example, correct
from saccade.tools.evaluation.resize import shrink, size_within
from saccade.tools.evaluation.score import Outcome


@dataclass(frozen=True)
class Asked:
    """One request: an example with its picture at some size, for the levels that come to that size."""

    example: Example
    image: Pixels  # [height, width, 3]
    limits: tuple[int | None, ...]
    text: str  # the question as it is sent

    @property
    def size(self) -> tuple[int, int]:
        return self.image.shape[1], self.image.shape[0]

    def messages(self) -> list[dict[str, Any]]:
        content = [{"type": "image", "image": self.image}, {"type": "text", "text": self.text}]
        return [{"role": "user", "content": content}]


def greedy(max_tokens: int) -> SamplingParams:
    """The likeliest token each time, whatever the checkpoint's defaults are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0)


def at_sizes(
    example: Example,
    limits: Sequence[int | None],
    processing: ImageProcessing,
    instruction: str | None,
) -> list[Asked]:
    """The requests one example becomes, one for each distinct size."""
    native = example.image.shape[1], example.image.shape[0]
    levels: dict[tuple[int, int], list[int | None]] = {}
    for limit in limits:
        size = native if limit is None else size_within(native, limit, processing)
        levels.setdefault(size, []).append(limit)
    text = example.question if instruction is None else f"{example.question}\n{instruction}"
    return [Asked(example, shrink(example.image, size), tuple(same), text) for size, same in levels.items()]


class Asker:
    """An engine with the questions' parameters."""

    def __init__(self, llm: LLM, max_tokens: int, batch: int) -> None:
        self._llm = llm
        self._params = greedy(max_tokens)
        self._batch = batch
        self._ends = frozenset(llm.front.checkpoint.eos_ids)

    def answer(self, requests: Sequence[Asked]) -> list[tuple[Asked, Output]]:
        """All of them, at most `batch` in the engine at once."""
        answered: list[tuple[Asked, Output]] = []
        for start in range(0, len(requests), self._batch):
            some = requests[start : start + self._batch]
            conversations = [one.messages() for one in some]
            outputs = self._llm.chat(conversations, self._params, progress=False)
            answered += zip(some, outputs, strict=True)
        return answered

    def outcomes(self, asked: Asked, output: Output) -> list[Outcome]:
        """One per level that came to this picture size."""
        choice = output.outputs[0]
        return [
            Outcome(
                task=asked.example.task,
                index=asked.example.index,
                limit=limit,
                size=asked.size,
                visual_tokens=output.usage.visual_tokens,
                text=choice.text,
                token_ids=without_end(choice.token_ids, self._ends),
                finish=choice.finish_reason,
                right=correct(asked.example, choice.text),
            )
            for limit in asked.limits
        ]


def without_end(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    """An answer's tokens up to the first end token."""
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:stop])
