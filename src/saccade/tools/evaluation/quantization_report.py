"""Results of `saccade eval-quant`: figures by scheme and kind of prompt, as a table, JSON and a plot."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from saccade.errors import ConfigError
from saccade.tools.environment import RunInfo
from saccade.tools.options import QuantEvalOptions
from saccade.tools.report import json_with_questions, output_console, percentile, table

SCHEMA = 1
TEXT, IMAGES = "text", "images"
PLOTTER = "saccade.tools.evaluation.quantization_plot"


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    right: bool | None  # None: nobody knows


@dataclass(frozen=True)
class TokenStats:
    """Of each token of the base's answer."""

    kld: tuple[float, ...]  # KL(base || scheme), nats
    same_top: tuple[bool, ...]  # whether the most likely token is the base's
    base_logprob: tuple[float, ...]
    logprob: tuple[float, ...]


@dataclass(frozen=True)
class PromptResult:
    kind: str
    key: tuple[str, int]
    answer: Answer
    base: Answer
    stats: TokenStats

    @property
    def changed(self) -> bool:
        return self.answer.text != self.base.text

    @property
    def flipped(self) -> bool:
        """Whether a right answer became wrong, or a wrong one right."""
        return self.answer.right != self.base.right


@dataclass(frozen=True)
class QuantFigures:
    """One scheme against the base, on one kind of prompt."""

    prompts: int
    tokens: int
    kld_mean: float
    kld_median: float
    kld_99: float
    kld_999: float
    kld_max: float
    probability_rms: float  # of the difference of the forced token's probability
    top_1: float  # share of positions with the same most likely token
    perplexity: float
    perplexity_ratio: float
    changed: int  # answers with another text
    lost: int | None  # right to wrong; None where nobody knows what is right
    won: int | None  # wrong to right

    @property
    def flips(self) -> int | None:
        return None if self.lost is None or self.won is None else self.lost + self.won


def figures(results: Sequence[PromptResult]) -> QuantFigures:
    kld = [value for one in results for value in one.stats.kld]
    same = [value for one in results for value in one.stats.same_top]
    base = [value for one in results for value in one.stats.base_logprob]
    own = [value for one in results for value in one.stats.logprob]
    known = all(one.base.right is not None for one in results)
    flipped = [one for one in results if one.flipped]
    squares = [(math.exp(p) - math.exp(q)) ** 2 for p, q in zip(base, own, strict=True)]
    return QuantFigures(
        prompts=len(results),
        tokens=len(kld),
        kld_mean=math.fsum(kld) / len(kld),
        kld_median=percentile(kld, 0.5),
        kld_99=percentile(kld, 0.99),
        kld_999=percentile(kld, 0.999),
        kld_max=max(kld),
        probability_rms=math.sqrt(math.fsum(squares) / len(squares)),
        top_1=sum(same) / len(same),
        perplexity=math.exp(-math.fsum(own) / len(own)),
        perplexity_ratio=math.exp((math.fsum(base) - math.fsum(own)) / len(own)),
        changed=sum(one.changed for one in results),
        lost=sum(bool(one.base.right) for one in flipped) if known else None,
        won=sum(not one.base.right for one in flipped) if known else None,
    )


@dataclass(frozen=True)
class SchemeResult:
    name: str
    stages: dict[str, str]  # the scheme of decoder, vision and head
    weight_bytes: int  # in memory
    tokens_per_second: float
    results: tuple[PromptResult, ...]

    @cached_property
    def by_kind(self) -> dict[str, QuantFigures]:
        kinds = [kind for kind in (TEXT, IMAGES) if any(one.kind == kind for one in self.results)]
        return {kind: figures([one for one in self.results if one.kind == kind]) for kind in kinds}


@dataclass(frozen=True)
class QuantReport:
    run: RunInfo
    weights: str
    options: QuantEvalOptions
    seconds: float
    schemes: tuple[SchemeResult, ...]  # the base first

    @property
    def base(self) -> SchemeResult:
        return self.schemes[0]


HEADS = (
    *("scheme", "prompts", "tokens", "KLD mean", "99%", "max", "top-1", "perplexity", "changed", "flips"),
    *("weights", "tok/s", "speed"),
)


def report_rows(report: QuantReport) -> list[list[str]]:
    """A row per scheme and kind of prompt; bytes and speed in the first of a scheme."""
    rows = []
    for scheme in report.schemes:
        speed = scheme.tokens_per_second / report.base.tokens_per_second
        about = [f"{scheme.weight_bytes / 1e6:,.1f} MB", f"{scheme.tokens_per_second:,.1f}", f"{speed:.2f}x"]
        for number, (kind, one) in enumerate(scheme.by_kind.items()):
            rows.append(
                [
                    scheme.name if number == 0 else "",
                    f"{one.prompts} {kind}",
                    str(one.tokens),
                    *(f"{value:.5f}" for value in (one.kld_mean, one.kld_99, one.kld_max)),
                    f"{one.top_1:.2%}",
                    f"{one.perplexity_ratio:.4f}x",
                    str(one.changed),
                    "" if one.flips is None else f"{one.flips} (-{one.lost} +{one.won})",
                    *(about if number == 0 else ["", "", ""]),
                ]
            )
    return rows


def print_report(report: QuantReport) -> None:
    console = output_console(report.options.json)
    title = f"{report.run.title}: quantised, against {report.run.dtype}"
    console.print(table(title, HEADS, report_rows(report), left=HEADS[:2]))


def as_json(report: QuantReport) -> str:
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "model": report.run.model,
        "weights": report.weights,
        "commit": report.run.commit,
        "date": report.run.date,
        "command": report.run.command,
        "machine": report.run.machine,
        "versions": report.run.versions,
        "dtype": report.run.dtype,
        "options": {**asdict(report.options), "plot": report.options.plot and str(report.options.plot)},
        "seconds": round(report.seconds, 3),
        "schemes": [
            {
                "name": scheme.name,
                "stages": scheme.stages,
                "weight_bytes": scheme.weight_bytes,
                "tokens_per_second": scheme.tokens_per_second,
                "speed_ratio": scheme.tokens_per_second / report.base.tokens_per_second,
                **{kind: {**asdict(one), "flips": one.flips} for kind, one in scheme.by_kind.items()},
            }
            for scheme in report.schemes
        ],
    }
    return json_with_questions(head, _questions(report), indent=1)


def _questions(report: QuantReport) -> list[dict[str, Any]]:
    """One per prompt: the base's answer, and of every scheme the mean KL divergence and a changed answer."""
    lines = []
    for same in zip(*(scheme.results for scheme in report.schemes), strict=True):
        base = same[0]
        line: dict[str, Any] = {"task": base.key[0], "index": base.key[1], "answer": base.answer.text}
        line["right"] = base.answer.right
        for scheme, one in zip(report.schemes[1:], same[1:], strict=True):
            kld = math.fsum(one.stats.kld) / len(one.stats.kld)
            changed = {"answer": one.answer.text, "right": one.answer.right} if one.changed else {}
            line[scheme.name] = {"kld": round(kld, 7), **changed}
        lines.append(line)
    return lines


class Plotter(Protocol):
    def save(self, report: QuantReport, path: Path) -> None: ...


def load_plotter() -> Plotter:
    """Imported by name: matplotlib comes with the extra `tools`, which servers do not need."""
    try:
        return cast(Plotter, import_module(PLOTTER))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plots need {error.name}; install it with: pip install 'saccade[tools]'"
        ) from error
