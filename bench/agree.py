"""Do the kernels and the reference implementation give the same tokens? Same questions, weights and dtype.

    python -m bench.agree [MODEL] [--questions 300] [options of the engine]

`fast` is the engine as it serves (kernels, CUDA graphs, overlap, everything in one batch); the reference
computes with plain PyTorch, a few questions at a time, without a prefix cache. Greedy answers are compared up
to the first difference. There the reference gives the distance of the two tokens: within the rounding of the
dtype it is a tie, which either path may break either way. Distances are in units in the last place (ulp) of
the dtype at the largest logit. With --rounding the fast path also returns log-probabilities, which shows the
rounding of equal tokens; CUDA graphs give none, so that is another path."""

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor

from bench.questions import Questions, Scope
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, with_options
from saccade.config import EngineConfig
from saccade.engine.memory import DTYPES
from saccade.llm import LLM
from saccade.models.interface import LanguageModel
from saccade.sampling_params import SamplingParams
from saccade.tools.report import percentile

TIE = 2.0  # ulp: each of two logits is rounded by half of one, in either path
NEAR = 16.0  # ulp: what rounding in every layer can add up to
BESIDE = 20  # likeliest tokens that the reference reports: of flat logits many lie within rounding


@dataclass(frozen=True)
class Answer:
    """One path's answer to one question."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]  # of the likeliest tokens, by position; none where not asked for


@dataclass(frozen=True)
class Difference:
    question: int
    place: int
    fast: int
    reference: int
    ulps: (
        float | None
    )  # between the two in the reference implementation; None: the other was not among the likeliest


def configs(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The engine as it serves, and the reference implementation."""
    reference = replace(
        config, kernels="torch", graphs="off", early_launch="off", overlap=False, prefix_caching=False
    )
    return config, reference


def answers(
    config: EngineConfig, seed: int, count: int, scope: Scope, tokens: int, *, together: int, logprobs: bool
) -> tuple[list[Answer], float]:
    """Every question's answer, and one ulp at the largest logit met."""
    llm = LLM(config.model, progress=False, **config.options())
    asked = Questions(llm, seed, scope).take(count)
    beside = BESIDE if logprobs else None
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=beside)
    found: list[Answer] = []
    began = time.perf_counter()
    with _largest_logit() as largest:
        for start in range(0, count, together):
            for output in llm.generate(asked[start : start + together], params, progress=False):
                choice = output.outputs[0]
                near = [{one.id: one.logprob for one in (at.sampled, *at.top)} for at in choice.logprobs]
                found.append(Answer(tuple(choice.token_ids), tuple(near)))
        seconds = time.perf_counter() - began
    llm.engine.check()
    info = llm.engine.info
    llm.close()
    del llm
    if info.device.startswith("cuda"):
        torch.cuda.empty_cache()
    speed = f"{count} questions in {seconds:.1f} s, {together} at a time"
    print(f"kernels {config.kernels}: {speed}, on {info.device}, {info.dtype}", flush=True)
    return found, unit(largest[0], DTYPES[info.dtype])


@contextlib.contextmanager
def _largest_logit() -> Iterator[list[float]]:
    """While inside: the largest logit any model of this process computes (outside CUDA graphs)."""
    largest = [0.0]
    classes = [kind for kind in _below(LanguageModel) if "logits" in vars(kind)]
    plain = {kind: vars(kind)["logits"] for kind in classes}

    def recording(kind: type[LanguageModel]) -> Any:
        def logits(self: LanguageModel, hidden: Tensor) -> Tensor:
            result: Tensor = plain[kind](self, hidden)
            if not (result.is_cuda and torch.cuda.is_current_stream_capturing()):
                largest[0] = max(largest[0], float(result.abs().max()))
            return result

        return logits

    for kind in classes:
        kind.logits = recording(kind)
    try:
        yield largest
    finally:
        for kind in classes:
            kind.logits = plain[kind]


def _below(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(lower for one in kind.__subclasses__() for lower in _below(one))]


def unit(largest: float, dtype: torch.dtype) -> float:
    """The distance of two neighbouring numbers of the dtype at that size."""
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))


def compare(fast: list[Answer], reference: list[Answer], ulp: float) -> tuple[list[Difference], list[float]]:
    """The first difference of each pair of answers; how far apart equal tokens' log-probabilities were."""
    found, apart = [], []
    for number, (one, other) in enumerate(zip(fast, reference, strict=True)):
        for place, (token, wanted) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            if token == wanted:
                if one.logprobs:
                    apart.append(abs(one.logprobs[place][token] - other.logprobs[place][token]) / ulp)
                continue
            near = other.logprobs[place]
            ulps = (near[wanted] - near[token]) / ulp if token in near else None
            found.append(Difference(number, place, token, wanted, ulps))
            break
    return found, apart


def kind_of(difference: Difference) -> str:
    if difference.ulps is None or difference.ulps > NEAR:
        return "other"
    return "tie" if difference.ulps <= TIE else "near"


def report(found: list[Difference], apart: list[float], count: int) -> int:
    kinds = Counter(kind_of(one) for one in found)
    print(f"equal answers               {count - len(found)} of {count}")
    print(f"ended by a tie (<= {TIE:g} ulp)   {kinds['tie']}")
    print(f"near (<= {NEAR:g} ulp)            {kinds['near']}")
    print(f"other                       {kinds['other']}")
    if apart:
        shares = [percentile(apart, share) for share in (0.5, 0.99, 1.0)]
        shown = ", ".join(
            f"{name} {value:.2f}" for name, value in zip(("p50", "p99", "most"), shares, strict=True)
        )
        print(f"log-probabilities of {len(apart)} equal tokens differ by ulp: {shown}")
    for one in found[:20]:
        distance = "not among the likeliest" if one.ulps is None else f"{one.ulps:.2f} ulp apart"
        print(f"  question {one.question}, token {one.place}: {one.fast} for {one.reference}, {distance}")
    return kinds["other"]


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--questions", type=int, default=300)
@option("--answer-tokens", type=int, default=32)
@option("--image-share", type=float, default=0.3)
@option("--questions-seed", type=int, default=0)
@option("--reference-batch", type=int, default=16, help="questions that the reference computes together")
@option("--rounding/--no-rounding", default=False)
@with_options(ENGINE_OPTIONS)
def main(
    model: str,
    questions: int,
    answer_tokens: int,
    image_share: float,
    questions_seed: int,
    reference_batch: int,
    rounding: bool,
    **given: Any,
) -> None:
    fast, reference = configs(engine_config(model, given))
    scope = Scope(images=image_share)
    asked = (questions_seed, questions, scope, answer_tokens)
    quick, _ = answers(fast, *asked, together=questions, logprobs=rounding)
    slow, ulp = answers(reference, *asked, together=reference_batch, logprobs=True)
    print(f"one ulp at the largest logit: {ulp:.2g}")
    found, apart = compare(quick, slow, ulp)
    sys.exit(1 if report(found, apart, questions) else 0)


if __name__ == "__main__":
    main()
