"""Asks Hugging Face transformers the questions of `saccade eval` and compares the tokens.

    python -m bench.peer_answers [MODEL] --limit 10 --json docs/quality/sample.json

Options are those of `saccade eval`. The dtype is float32 unless given: rounding must not decide."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from PIL import Image

from bench.transformers_peer import TransformersPeer, common_prefix
from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, with_options
from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.llm import RequestOutput
from saccade.tools.bench.workloads import Prompt
from saccade.tools.evaluation.command import Evaluation, SizedQuestion, evaluate
from saccade.tools.evaluation.question_set import correct
from saccade.tools.evaluation.report import Outcome, as_json, print_report
from saccade.tools.options import EvalOptions
from saccade.tools.report import output_console, write_json


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    prompt: tuple[int, ...]  # one placeholder for the image
    visual_tokens: int
    token_ids: tuple[int, ...]  # without the end token
    text: str
    right: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """One question, answered by both engines."""

    ours: Outcome
    theirs: PeerAnswer
    same_prompt: bool  # same text tokens and the same number of visual tokens

    @property
    def equal(self) -> bool:
        return self.ours.token_ids == self.theirs.token_ids


@dataclass(frozen=True, slots=True)
class Agreement:
    peer: str
    questions: int
    equal: int  # answers equal token for token
    same_prompts: int
    tokens: int  # of the peer's answers
    shared_tokens: int  # of those, before the first difference
    peer_right: int

    def __str__(self) -> str:
        return (
            f"{self.peer}: {self.equal} of {self.questions} greedy answers equal token for token,"
            f" {self.shared_tokens} of {self.tokens} tokens before a first difference;"
            f" {self.same_prompts} of {self.questions} prompts equal;"
            f" {self.peer_right} of its answers right"
        )


def agreement(peer: str, pairs: Sequence[Pair]) -> Agreement:
    return Agreement(
        peer=peer,
        questions=len(pairs),
        equal=sum(pair.equal for pair in pairs),
        same_prompts=sum(pair.same_prompt for pair in pairs),
        tokens=sum(len(pair.theirs.token_ids) for pair in pairs),
        shared_tokens=sum(common_prefix(pair.ours.token_ids, pair.theirs.token_ids) for pair in pairs),
        peer_right=sum(pair.theirs.right for pair in pairs),
    )


class PeerEvaluation(Evaluation):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        info = self._llm.engine.info
        checkpoint = self._llm.processor.checkpoint
        self._peer = TransformersPeer(checkpoint, info.device, info.dtype, stop_at_end=True)
        self.pairs: list[Pair] = []

    def record(self, asked: SizedQuestion, output: RequestOutput) -> None:
        super().record(asked, output)
        prompt = Prompt(self._peer.chat_tokens(asked.text), Image.fromarray(asked.image))
        (found,) = self._peer.generate([prompt], self._options.max_tokens)
        text = self._peer.decode(found.token_ids)
        theirs = PeerAnswer(
            prompt=tuple(prompt.tokens),
            visual_tokens=found.visual_tokens,
            token_ids=tuple(found.token_ids),
            text=text,
            right=correct(asked.example, text),
        )
        same = (theirs.prompt, theirs.visual_tokens) == (output.prompt_token_ids, output.usage.visual_tokens)
        pair = Pair(self.outcomes[-1], theirs, same)
        self.pairs.append(pair)
        key = (asked.example.task, asked.example.index)
        question = next(one for one in self.questions if (one["task"], one["index"]) == key)
        question["peer"] = {
            "text": text,
            "right": theirs.right,
            "equal": pair.equal,
            "same_prompt": same,
            "token_ids": theirs.token_ids,
            "our_token_ids": pair.ours.token_ids,
        }


def run(engine: EngineConfig, options: EvalOptions) -> int:
    if options.curve:
        raise ConfigError("the peer compares one level of detail; leave out --curve")
    if engine.dtype == "auto":
        engine = replace(engine, dtype="float32")
    report, evaluation = evaluate(engine, options, PeerEvaluation)
    found = agreement("transformers", evaluation.pairs)
    print_report(report)
    output_console(options.json).print(str(found))
    write_json(options.json, as_json(report, peer=asdict(found)))
    return 0


@click.command()
@click.argument("model", default="embedded")
@with_options(config_options(EvalOptions), ENGINE_OPTIONS)
def main(model: str, **given: Any) -> None:
    engine = engine_config(model, given)
    run(engine, EvalOptions(**given))


if __name__ == "__main__":
    main()
