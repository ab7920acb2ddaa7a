"""The library: an engine in this process, asked in batches.

    llm = LLM("embedded")
    answers = llm.generate([{"prompt": ..., "images": [picture]}], SamplingParams(max_tokens=64))

takes   prompts or conversations in any form `Front` understands
gives   one `Output` per prompt, in order
owns    an engine, and the front that prepares its requests
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, MediaLimits
from saccade.errors import InvalidValue, SaccadeError
from saccade.front import Front
from saccade.request import Delta, Request
from saccade.runtime.engine import Engine
from saccade.sampling import SamplingParams
from saccade.text.answer import Answer, Choice, Usage

Prompt = str | Mapping[str, Any] | Sequence[int]
PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "images", "videos"))
PREPARERS = 4  # threads that decode pictures and tokenise ahead of the engine


@dataclass(frozen=True)
class Output:
    """The answer to one prompt: `outputs[i]` has token_ids, text, finish and logprobs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # one placeholder per picture
    outputs: list[Choice]
    usage: Usage


class LLM:
    """A model, loaded and ready. Options are those of `EngineConfig`; `itl_target` is off unless given."""

    def __init__(
        self, model: str, *, media: MediaLimits | None = None, progress: bool = True, **options: Any
    ) -> None:
        self._progress = progress
        if options.get("itl_target") is None:
            options["itl_target"] = 0.0  # nobody reads along: the largest steps are the fastest
        self.engine = Engine(EngineConfig(model=model, **options), progress=progress)
        limits = media or MediaLimits()
        self.front = Front(open_checkpoint(model), self.engine.info.max_model_len, limits)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer prompts: strings, token ids, or dicts.

        A dict has `prompt` or `prompt_token_ids`, and may have `images` and `videos`. All prompts are checked
        before the first is computed, so a bad one costs nothing.
        """
        many = _as_prompts(prompts)

        def prepare(prompt: Prompt, one: SamplingParams, name: str) -> Request:
            parts = _as_parts(prompt)
            images, videos = parts.get("images", ()), parts.get("videos", ())
            text = parts["prompt"] if "prompt" in parts else parts["prompt_token_ids"]
            return self.front.prepare_prompt(text, one, name, images=images, videos=videos, trusted=True)

        return self._answer(many, params, prepare, progress)

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer one conversation (a list of OpenAI messages) or several (a list of such lists)."""
        if not messages:
            raise InvalidValue("messages is empty; give at least one message", param="messages")
        many = [messages] if isinstance(messages[0], Mapping) else messages

        def prepare(conversation: Sequence[Mapping[str, Any]], one: SamplingParams, name: str) -> Request:
            return self.front.prepare_chat(conversation, one, name, trusted=True)

        return self._answer(many, params, prepare, progress)

    def close(self) -> None:
        self.front.close()

    def _answer(
        self,
        asked: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[Any, SamplingParams, str], Request],
        progress: bool | None,
    ) -> list[Output]:
        each = _one_for_each(params, len(asked))
        names = [f"request-{next(self._numbers)}" for _ in asked]
        with ThreadPoolExecutor(PREPARERS) as pool:
            requests = list(pool.map(prepare, asked, each, names))
        show = self._progress if progress is None else progress
        answers = self._run(requests, each, show and len(requests) > 1)
        return [
            Output(request.id, request.prompt, answer.choices, answer.usage)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _run(self, requests: Sequence[Request], params: Sequence[SamplingParams], show: bool) -> list[Answer]:
        answers = {r.id: self.front.answer(r, one) for r, one in zip(requests, params, strict=True)}
        try:
            for request in requests:
                self.engine.submit(request)
            with _bar(show) as bar:
                task = bar.add_task("answering", total=len(requests))
                for done in self._drain(answers):
                    bar.update(task, advance=done)
        finally:  # an interrupt or a refusal leaves nothing behind in the engine
            self.engine.cancel(name for name, answer in answers.items() if not answer.done)
        return list(answers.values())

    def _drain(self, answers: dict[str, Answer]) -> Iterator[int]:
        """Step until every answer is whole; yields how many became so in each step."""
        open_answers = len(answers)
        while open_answers:
            done = 0
            for delta in self.engine.step():
                if delta.error:
                    raise SaccadeError(delta.error)
                answer = answers.get(delta.request_id)
                if answer is not None and self._push(answer, delta):
                    done += 1
            open_answers -= done
            yield done

    def _push(self, answer: Answer, delta: Delta) -> bool:
        """Fold a delta in; whether it made the answer whole."""
        was_done = answer.done
        answer.push(delta)
        if answer.done and answer.must_cancel:
            self.engine.cancel([delta.request_id])
        return answer.done and not was_done


def _bar(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not show, transient=True)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_parts(prompt: Prompt) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    unknown = set(prompt) - PROMPT_KEYS
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        told = f"; {', '.join(sorted(map(str, unknown)))} is not known" if unknown else ""
        raise InvalidValue(
            f"a prompt has either `prompt` or `prompt_token_ids`, and may have `images` and `videos`{told}",
            param="prompt",
        )
    return prompt


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidValue(
            f"{len(params)} sampling parameters were given for {count} prompts", param="params"
        )
    return params
