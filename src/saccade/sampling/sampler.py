"""Logits become tokens, on the device, without the host ever waiting.

takes   the logits of a step's sampling rows, and what each row asked for when it entered
gives   tokens on the device, log-probabilities where asked, and a promise of both on the host
owns    the sampling parameters of every device row, and their token counts once some row needs them
never   synchronises with the device in `enter` or `sample`: what a step needs is decided from what the host
        knows of its rows, so a batch of greedy rows is one argmax

Order of operations: log-probabilities of the untouched logits; logit bias; end tokens barred below
min_tokens; repetition, frequency and presence penalties; temperature; top-k, top-p, min-p; Gumbel noise;
argmax.

The noise of a token is a hash of the request's seed, the output position and the token id, so a request draws
the same tokens whatever runs beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.sampling.greedy import greedy
from saccade.kernels.sampling.top_k_top_p import DrawTuning, draw_triton
from saccade.request import Sampling, TokenLogprobs
from saccade.sampling import rng as noise
from saccade.sampling.filters import (
    GREEDY_BELOW,
    KEY_LOW,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    scale_and_mask,
)
from saccade.sampling.penalties import TokenAddends, TokenHistory, send
from saccade.step_plan import ScheduledSequence, SlotInit

_CHUNK_VALUES = 1 << 24  # logits worked on at once by everything beyond argmax: bounds the workspace


class SamplingNeeds(NamedTuple):
    """What the host knows of a device row: enough to decide what a step must compute."""

    random: bool = False
    top_k: int = 0  # 0 is off
    top_p: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: int = 0  # 0 also when there is no end token to bar
    logprobs: int | None = None


class Sampler:
    """Sampling over fixed device rows."""

    def __init__(
        self, max_rows: int, vocab: int, device: torch.device, mode: KernelMode = DEFAULT_MODE
    ) -> None:
        self._vocab = vocab
        self._device, self._mode = device, mode
        self._uses = [SamplingNeeds()] * max_rows
        self._told: list[tuple[Sampling, int] | None] = [None] * max_rows  # with which seed
        self._parameters = torch.zeros(max_rows, 9, dtype=torch.float64, device=device)
        self._greedy = [True] * max_rows  # whether the row's line of those has the temperature 0
        self._bias = TokenAddends(max_rows, device)
        self._ends = TokenAddends(max_rows, device)
        self._history = TokenHistory(max_rows, vocab, device)
        self._spread = noise.spread(vocab, device)
        self._chunk = max(1, _CHUNK_VALUES // vocab)  # rows

    @property
    def nbytes(self) -> int:
        """Device memory held now; grows when a row first asks for penalties."""
        return self._parameters.nbytes + self._spread.nbytes + self._history.nbytes

    def enter(self, *entries: SlotInit) -> None:
        """Sequences take rows: what they asked for, and the tokens they have already produced. What a row has
        been told it is not told again: only a history of tokens can have changed meanwhile."""
        last = {entry.slot: entry for entry in entries}  # of a row told twice
        entries = tuple([entry for entry in last.values() if not self._knows(entry)])
        for entry in entries:
            self._note(entry)
        self._send([entry for entry in entries if not self._greedy_again(entry)])
        for entry in entries:
            self._told[entry.slot] = entry.sampling, entry.seed

    def _greedy_again(self, entry: SlotInit) -> bool:
        """Whether the row's line need not change: nothing but its temperature of 0 is ever read."""
        return self._greedy[entry.slot] and self._uses[entry.slot] == _GREEDY

    def _send(self, entries: Sequence[SlotInit]) -> None:
        if not entries:
            return
        rows = send(torch.tensor([entry.slot for entry in entries]), self._device)
        lines = [_line(entry.sampling, entry.seed) for entry in entries]
        self._parameters.index_copy_(0, rows, send(torch.tensor(lines, dtype=torch.float64), self._device))
        for entry in entries:
            self._greedy[entry.slot] = not self._uses[entry.slot].random

    def clear_slots(self) -> None:
        """Nobody has a row: whoever uses one without entering it asks for nothing."""
        self._uses = [_GREEDY] * len(self._uses)
        self._told = [None] * len(self._told)

    def _knows(self, entry: SlotInit) -> bool:
        told = self._told[entry.slot]
        same = told is not None and told[0] is entry.sampling and told[1] == entry.seed
        return same and not self._uses[entry.slot].penalties

    def _note(self, enter: SlotInit) -> None:
        sampling, row = enter.sampling, enter.slot
        self._told[row] = None  # until all of it is on its way
        use = describe(sampling, self._vocab)
        self._uses[row] = use
        if use.bias:
            known = {token: bias for token, bias in sampling.logit_bias.items() if 0 <= token < self._vocab}
            self._bias.set(row, list(known), list(known.values()))
        if use.min_tokens:
            ends = [token for token in sampling.stop_token_ids if 0 <= token < self._vocab]
            self._ends.set(row, ends, [-torch.inf] * len(ends))
        if use.penalties:
            self._history.set(row, enter.prompt, enter.output)

    def sample(
        self, logits: Tensor, rows: Sequence[ScheduledSequence], device_rows: Tensor, output_positions: Tensor
    ) -> "SampleOutput":
        """One token per line of `logits` [S, vocab] float32, which is used up (edited in place).

        `rows` says on the host what `device_rows` [S] and `output_positions` [S] (int64) say on the device.
        """
        uses = [self._uses[row.slot] for row in rows]
        tokens, finite = greedy(logits, self._mode)
        if all(use == _GREEDY for use in uses):
            return SampleOutput(tokens, finite, (None,) * len(uses), None)
        logits = logits.contiguous()
        steps = _Steps(uses, rows, self._device)
        raw = _Raw(logits, steps.index("logprobs"), uses) if steps.has("logprobs") else None
        parameters = self._parameters[device_rows]
        self._edit(logits, steps, device_rows, parameters)
        if steps.has("edited"):
            tokens = greedy(logits, self._mode)[0]
        if steps.has("random") and use_triton("draw", logits, self._mode):
            asking, outputs = device_rows.to(torch.int32), output_positions.contiguous()
            tokens = draw_triton(logits, asking, self._parameters, outputs)[0]
        elif steps.has("random"):
            self._draw(tokens, logits, steps, parameters, output_positions)
        if steps.has("penalties"):
            chosen = steps.index("penalties")
            self._history.count(device_rows[chosen], tokens[chosen])
        logprobs = None if raw is None else raw.of(tokens)
        return SampleOutput(tokens, finite, tuple(use.logprobs for use in uses), logprobs)

    def graph_ending(self, rows: Sequence[ScheduledSequence]) -> str:
        """How a captured step of these rows may end: "greedy", "sampled" by `draw`, or "logits"
        where a row asks for more, which `sample` then does."""
        uses = [self._uses[row.slot] for row in rows if row.sample]
        if all(use == _GREEDY for use in uses):
            return "greedy"
        more = any(
            use.penalties or use.bias or use.logprobs is not None or row.output_position < use.min_tokens
            for use, row in zip(uses, (row for row in rows if row.sample), strict=True)
        )
        by_twin = self._device.type == "cuda" and not use_triton("draw", self._parameters, self._mode)
        return "logits" if more or by_twin else "sampled"

    def draw(
        self,
        logits: Tensor,
        device_rows: Tensor,
        output_positions: Tensor,
        mode: KernelMode | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As device_rows [S] int32 ask (-1: nobody does): greedy, or drawn under top-k, top-p and min-p.

        Looks at nothing on the host but the CPU's own tensors, so it can be captured where it is a kernel.
        """
        mode = mode or self._mode
        if use_triton("draw", logits, mode):
            tuning = DrawTuning(pdl=mode.pdl)
            return draw_triton(logits, device_rows, self._parameters, output_positions, tuning)
        tokens, finite = greedy(logits, mode)
        parameters = self._parameters[device_rows.clamp(min=0).long()]
        random, k, p = parameters[:, TEMPERATURE] > 0, parameters[:, TOP_K], parameters[:, TOP_P]
        words = noise.words(parameters[:, KEY_LOW:].long(), output_positions)
        narrow = (k > 0) & (k < self._vocab)
        kinds = {"free": ~narrow & (p >= 1), "top_p": ~narrow & (p < 1), "top_k": narrow}
        for kind, asked in kinds.items():
            some = (random & asked).nonzero().flatten()
            if len(some):
                largest = int(k[some].max())
                scaled = scale_and_mask(logits[some].float(), parameters[some], kind, largest)
                bits = noise.random_bits(self._spread, words[some])
                tokens[some] = scaled.sub_(noise.log_exponential(bits)).argmax(dim=-1)
        return tokens, finite

    def _edit(self, logits: Tensor, steps: "_Steps", device_rows: Tensor, parameters: Tensor) -> None:
        """Everything that changes logits whether or not the row is greedy, in place."""
        for name, lists in (("bias", self._bias), ("ends", self._ends)):
            if steps.has(name):
                index = steps.index(name)
                lists.add_to(logits, index, device_rows[index])
        for some in steps.chunks("penalties", self._chunk):
            penalties = parameters[some, REPETITION:KEY_LOW].float()
            logits[some] = self._history.penalise(logits[some], device_rows[some], penalties)

    def _draw(
        self, tokens: Tensor, logits: Tensor, steps: "_Steps", parameters: Tensor, positions: Tensor
    ) -> None:
        """Write the tokens of the random rows; their logits are used up."""
        words = noise.words(parameters[:, KEY_LOW:].long(), positions)
        # Sorting holds several times what the other kinds hold of each row.
        for kind, size in (
            ("free", self._chunk),
            ("top_p", max(1, self._chunk // 4)),
            ("top_k", self._chunk),
        ):
            for some in steps.chunks(kind, size):
                scaled = scale_and_mask(logits[some], parameters[some], kind, steps.largest_k)
                bits = noise.random_bits(self._spread, words[some])
                tokens[some] = scaled.sub_(noise.log_exponential(bits)).argmax(dim=-1)


def describe(sampling: Sampling, vocab: int) -> SamplingNeeds:
    """What a row with these parameters will need, step by step."""
    random = sampling.temperature >= GREEDY_BELOW
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
        1,
        0,
        0,
    )
    return SamplingNeeds(
        random=random,
        top_k=sampling.top_k if random and 0 < sampling.top_k < vocab else 0,
        top_p=random and sampling.top_p < 1,
        penalties=penalties,
        bias=bool(sampling.logit_bias),
        min_tokens=sampling.min_tokens if sampling.stop_token_ids else 0,
        logprobs=None if sampling.logprobs is None else min(sampling.logprobs, vocab),
    )


_GREEDY = SamplingNeeds()


def _line(sampling: Sampling, seed: int) -> list[float]:
    """One line of the parameter table."""
    return [
        sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        *noise.key(seed),
    ]


class _Steps:
    """Which of the S rows each part of a step concerns: found on the host, uploaded in one copy if at all."""

    def __init__(
        self, uses: Sequence[SamplingNeeds], rows: Sequence[ScheduledSequence], device: torch.device
    ) -> None:
        random = [i for i, use in enumerate(uses) if use.random]
        self._members = {
            "edited": [i for i, use in enumerate(uses) if not use.random and use != _GREEDY],
            "random": random,
            "free": [i for i in random if not uses[i].top_k and not uses[i].top_p],
            "top_p": [i for i in random if not uses[i].top_k and uses[i].top_p],
            "top_k": [i for i in random if uses[i].top_k],
            "penalties": [i for i, use in enumerate(uses) if use.penalties],
            "bias": [i for i, use in enumerate(uses) if use.bias],
            "ends": [i for i, use in enumerate(uses) if rows[i].output_position < use.min_tokens],
            "logprobs": [i for i, use in enumerate(uses) if use.logprobs is not None],
        }
        self._device = device
        self.largest_k = max(use.top_k for use in uses)

    def has(self, name: str) -> bool:
        return bool(self._members[name])

    def index(self, name: str) -> Tensor:
        """[n] int64, on the device."""
        return self._indices[name]

    def chunks(self, name: str, size: int) -> Iterator[slice | Tensor]:
        """At most `size` rows at a time; neighbours as a slice, which copies and uploads nothing."""
        members = self._members[name]
        for start in range(0, len(members), size):
            some = members[start : start + size]
            neighbours = some[-1] - some[0] == len(some) - 1
            yield slice(some[0], some[-1] + 1) if neighbours else self.index(name)[start : start + size]

    @cached_property
    def _indices(self) -> dict[str, Tensor]:
        packed = torch.tensor([i for part in self._members.values() for i in part], dtype=torch.int64)
        sent = send(packed, self._device)
        ends = accumulate(len(part) for part in self._members.values())
        return {
            name: sent[end - len(part) : end]
            for (name, part), end in zip(self._members.items(), ends, strict=True)
        }


# -- log-probabilities and the way to the host


class Logprobs(NamedTuple):
    """Of the L rows that asked, in order: log-probabilities under the untouched logits."""

    sampled: Tensor  # [L]
    top_ids: Tensor  # [L, N], best first; N is the most any row asked for
    top: Tensor  # [L, N]


class _Raw:
    """The untouched logits of the rows that want log-probabilities."""

    def __init__(self, logits: Tensor, index: Tensor, uses: Sequence[SamplingNeeds]) -> None:
        self._index = index
        self._most = max(use.logprobs or 0 for use in uses)
        self._logprobs = logits[index].log_softmax(dim=-1)

    def of(self, tokens: Tensor) -> Logprobs:
        sampled = self._logprobs.gather(1, tokens[self._index].unsqueeze(1)).squeeze(1)
        top = self._logprobs.topk(self._most, dim=-1)
        return Logprobs(sampled, top.indices, top.values)


@dataclass(frozen=True)
class SampleOutput:
    """What a step sampled, still on the device."""

    tokens: Tensor  # [S] int64
    finite: Tensor  # [S] bool: whether the logits were numbers; if not, the token means nothing
    asked: tuple[int | None, ...]  # alternatives each of the S rows wants reported
    logprobs: Logprobs | None

    def to_host(self, lines: Sequence[int] | None = None) -> "HostSample":
        """Begin the copy to the host; `HostSample.wait` ends it. `lines`: which of the tokens are wanted,
        where there are others among them; None: all. The tensors may be written again right after this."""
        wanted = [self.tokens, self.finite, *(self.logprobs or ())]
        if self.tokens.device.type != "cuda":
            return HostSample([part.clone() for part in wanted], self.asked, None, lines)
        copies = [torch.empty_like(part, device="cpu", pin_memory=True) for part in wanted]
        for copy, part in zip(copies, wanted, strict=True):
            copy.copy_(part, non_blocking=True)
        done = torch.cuda.current_stream(self.tokens.device).record_event()
        return HostSample(copies, self.asked, done, lines)


class HostSample:
    """A step's samples on their way to the host."""

    def __init__(
        self,
        parts: list[Tensor],
        asked: tuple[int | None, ...],
        done: "torch.cuda.Event | None",
        lines: Sequence[int] | None = None,
    ) -> None:
        self._parts = parts
        self._asked = asked
        self._done = done
        self._lines = lines

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens and log-probabilities of the S rows, in their order; blocks until the device is done."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._parts[0].tolist()
        if self._lines is not None:
            tokens = [tokens[line] for line in self._lines]
        if len(self._parts) == 2:
            return tokens, [None] * len(tokens)
        lines = zip(*(part.tolist() for part in self._parts[2:]), strict=True)
        return tokens, [None if most is None else _report(most, *next(lines)) for most in self._asked]

    def nonfinite(self) -> tuple[int, ...]:
        """Which of the S tokens mean nothing; call it after `wait`."""
        finite = self._parts[1] if self._lines is None else self._parts[1][list(self._lines)]
        return () if bool(finite.all()) else tuple((~finite).nonzero().flatten().tolist())


def _report(most: int, sampled: float, ids: list[int], values: list[float]) -> TokenLogprobs:
    return TokenLogprobs(sampled=sampled, top=tuple(zip(ids[:most], values[:most], strict=True)))
