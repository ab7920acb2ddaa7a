"""From logits to tokens, on the device. The host never waits: what a step needs is decided from the
parameters that the host knows, so a batch of greedy sequences is one argmax.

Order of operations: log-probabilities of the raw logits; logit bias; stop tokens masked below min_tokens;
repetition, frequency and presence penalties; temperature; top-k, top-p, min-p; Gumbel noise; argmax.

The noise of a token is a hash of the request's seed, the output position and the token id, so a request draws
the same tokens whatever else is in its batch.
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
from saccade.sampling import rng
from saccade.sampling.filters import GREEDY_BELOW, KEY_LOW, REPETITION, scale_and_mask
from saccade.sampling.penalties import TokenAddends, TokenHistory, send
from saccade.step_plan import ScheduledSequence, SlotInit

_CHUNK_VALUES = 1 << 24  # logits worked on at once by everything beyond argmax: bounds the workspace


class SamplingNeeds(NamedTuple):
    """What a slot's sampling parameters require of a step."""

    random: bool = False
    top_k: int = 0  # 0 is off
    top_p: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: int = 0  # 0 also without stop tokens
    logprobs: int | None = None


class Sampler:
    def __init__(
        self, max_slots: int, vocab: int, device: torch.device, mode: KernelMode = DEFAULT_MODE
    ) -> None:
        self._vocab = vocab
        self._device, self._mode = device, mode
        self._needs = [SamplingNeeds()] * max_slots
        self._uploaded: list[tuple[Sampling, int] | None] = [None] * max_slots  # parameters and seed
        self._parameters = torch.zeros(max_slots, 9, dtype=torch.float64, device=device)
        self._greedy = [True] * max_slots  # whether the uploaded temperature is 0
        self._bias = TokenAddends(max_slots, device)
        self._ends = TokenAddends(max_slots, device)
        self._history = TokenHistory(max_slots, vocab, device)
        self._spread = rng.spread(vocab, device)
        self._chunk = max(1, _CHUNK_VALUES // vocab)  # lines

    @property
    def nbytes(self) -> int:
        """Device memory held now; grows with the first penalties."""
        return self._parameters.nbytes + self._spread.nbytes + self._history.nbytes

    def enter(self, *entries: SlotInit) -> None:
        """Sequences take slots, with their parameters and the tokens they already have. Parameters that the
        slot has are not uploaded again; a token history is, for it may have changed."""
        last = {entry.slot: entry for entry in entries}
        entries = tuple([entry for entry in last.values() if not self._knows(entry)])
        for entry in entries:
            self._set_slot(entry)
        self._send([entry for entry in entries if not self._greedy_again(entry)])
        for entry in entries:
            self._uploaded[entry.slot] = entry.sampling, entry.seed

    def _greedy_again(self, entry: SlotInit) -> bool:
        """Whether nothing needs uploading: of a greedy slot only the temperature, 0, is read."""
        return self._greedy[entry.slot] and self._needs[entry.slot] == _GREEDY

    def _send(self, entries: Sequence[SlotInit]) -> None:
        if not entries:
            return
        slots = send(torch.tensor([entry.slot for entry in entries]), self._device)
        lines = [_line(entry.sampling, entry.seed) for entry in entries]
        self._parameters.index_copy_(0, slots, send(torch.tensor(lines, dtype=torch.float64), self._device))
        for entry in entries:
            self._greedy[entry.slot] = not self._needs[entry.slot].random

    def clear_slots(self) -> None:
        """Reset all slots to greedy."""
        self._needs = [_GREEDY] * len(self._needs)
        self._uploaded = [None] * len(self._uploaded)

    def _knows(self, entry: SlotInit) -> bool:
        known = self._uploaded[entry.slot]
        same = known is not None and known[0] is entry.sampling and known[1] == entry.seed
        return same and not self._needs[entry.slot].penalties

    def _set_slot(self, enter: SlotInit) -> None:
        sampling, slot = enter.sampling, enter.slot
        self._uploaded[slot] = None  # until the upload is complete
        need = describe(sampling, self._vocab)
        self._needs[slot] = need
        if need.bias:
            known = {token: bias for token, bias in sampling.logit_bias.items() if 0 <= token < self._vocab}
            self._bias.set(slot, list(known), list(known.values()))
        if need.min_tokens:
            ends = [token for token in sampling.stop_token_ids if 0 <= token < self._vocab]
            self._ends.set(slot, ends, [-torch.inf] * len(ends))
        if need.penalties:
            self._history.set(slot, enter.prompt, enter.output)

    def sample(
        self, logits: Tensor, scheduled: Sequence[ScheduledSequence], slots: Tensor, output_positions: Tensor
    ) -> "SampleOutput":
        """One token per line of `logits` [S, vocab] float32, which is edited in place.

        `slots` [S] and `output_positions` [S] (int64) are those of `scheduled`, on the device.
        """
        needs = [self._needs[one.slot] for one in scheduled]
        tokens, finite = greedy(logits, self._mode)
        if all(need == _GREEDY for need in needs):
            return SampleOutput(tokens, finite, (None,) * len(needs), None)
        logits = logits.contiguous()
        ends = [i for i, one in enumerate(scheduled) if one.output_position < needs[i].min_tokens]
        members = _Members(needs, ends, self._device)
        raw = _RawLogprobs(logits, members.index("logprobs"), needs) if members.has("logprobs") else None
        parameters = self._parameters[slots]
        self._edit(logits, members, slots, parameters)
        if members.has("edited"):
            tokens = greedy(logits, self._mode)[0]
        if members.has("random") and use_triton("draw", logits, self._mode):
            asking, outputs = slots.to(torch.int32), output_positions.contiguous()
            tokens = draw_triton(logits, asking, self._parameters, outputs)[0]
        elif members.has("random"):
            self._draw(tokens, logits, members, parameters, output_positions)
        if members.has("penalties"):
            chosen = members.index("penalties")
            self._history.count(slots[chosen], tokens[chosen])
        logprobs = None if raw is None else raw.of(tokens)
        return SampleOutput(tokens, finite, tuple(need.logprobs for need in needs), logprobs)

    def graph_ending(self, scheduled: Sequence[ScheduledSequence]) -> str:
        """How a CUDA graph step of these sequences can end: "greedy", "sampled" with `draw`, or "logits" if
        one needs more, which `sample` then does."""
        needs = [self._needs[one.slot] for one in scheduled if one.sample]
        if all(need == _GREEDY for need in needs):
            return "greedy"
        more = any(
            need.penalties or need.bias or need.logprobs is not None or one.output_position < need.min_tokens
            for need, one in zip(needs, (one for one in scheduled if one.sample), strict=True)
        )
        by_reference = self._device.type == "cuda" and not use_triton("draw", self._parameters, self._mode)
        return "logits" if more or by_reference else "sampled"

    def draw(
        self, logits: Tensor, slots: Tensor, output_positions: Tensor, mode: KernelMode | None = None
    ) -> tuple[Tensor, Tensor]:
        """Greedy or random under top-k, top-p and min-p, by the parameters of slots [S] int32 (-1: padding).
        May edit the logits. The kernel can be captured; the reference reads the slots back."""
        mode = mode or self._mode
        if use_triton("draw", logits, mode):
            tuning = DrawTuning(pdl=mode.pdl)
            return draw_triton(logits, slots, self._parameters, output_positions, tuning)
        tokens, finite = greedy(logits, mode)
        needs = [_GREEDY if slot < 0 else self._needs[slot] for slot in slots.tolist()]
        parameters = self._parameters[slots.clamp(min=0).long()]
        self._draw(tokens, logits.float(), _Members(needs, (), self._device), parameters, output_positions)
        return tokens, finite

    def _edit(self, logits: Tensor, members: "_Members", slots: Tensor, parameters: Tensor) -> None:
        """Bias, min_tokens and penalties, which apply to greedy sequences too; in place."""
        for name, lists in (("bias", self._bias), ("ends", self._ends)):
            if members.has(name):
                index = members.index(name)
                lists.add_to(logits, index, slots[index])
        for some in members.chunks("penalties", self._chunk):
            penalties = parameters[some, REPETITION:KEY_LOW].float()
            logits[some] = self._history.penalise(logits[some], slots[some], penalties)

    def _draw(
        self, tokens: Tensor, logits: Tensor, members: "_Members", parameters: Tensor, positions: Tensor
    ) -> None:
        """Write the tokens of random sequences; edits their logits."""
        words = rng.words(parameters[:, KEY_LOW:].long(), positions)
        # Sorting needs several times the memory of the other kinds.
        for kind in ("free", "top_p", "top_k"):
            for some in members.chunks(kind, max(1, self._chunk // 4) if kind == "top_p" else self._chunk):
                scaled = scale_and_mask(logits[some], parameters[some], kind, members.largest_k)
                bits = rng.random_bits(self._spread, words[some])
                tokens[some] = scaled.sub_(rng.log_exponential(bits)).argmax(dim=-1)


def describe(sampling: Sampling, vocab: int) -> SamplingNeeds:
    """What these parameters require of a step."""
    random = sampling.temperature >= GREEDY_BELOW
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    return SamplingNeeds(
        random=random,
        top_k=sampling.top_k if random and 0 < sampling.top_k < vocab else 0,
        top_p=random and sampling.top_p < 1,
        penalties=penalties != (1, 0, 0),
        bias=bool(sampling.logit_bias),
        min_tokens=sampling.min_tokens if sampling.stop_token_ids else 0,
        logprobs=None if sampling.logprobs is None else min(sampling.logprobs, vocab),
    )


_GREEDY = SamplingNeeds()


def _line(sampling: Sampling, seed: int) -> list[float]:
    """One line of the parameter table (filters.py)."""
    return [
        sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        *rng.key(seed),
    ]


class _Members:
    """Which of the S sequences each operation applies to; uploaded in one copy, if at all."""

    def __init__(self, needs: Sequence[SamplingNeeds], ends: Sequence[int], device: torch.device) -> None:
        """`ends`: whose stop tokens are masked."""
        random = [i for i, need in enumerate(needs) if need.random]
        self._members = {
            "edited": [i for i, need in enumerate(needs) if not need.random and need != _GREEDY],
            "random": random,
            "free": [i for i in random if not needs[i].top_k and not needs[i].top_p],
            "top_p": [i for i in random if not needs[i].top_k and needs[i].top_p],
            "top_k": [i for i in random if needs[i].top_k],
            "penalties": [i for i, need in enumerate(needs) if need.penalties],
            "bias": [i for i, need in enumerate(needs) if need.bias],
            "ends": ends,
            "logprobs": [i for i, need in enumerate(needs) if need.logprobs is not None],
        }
        self._device = device
        self.largest_k = max(need.top_k for need in needs)

    def has(self, name: str) -> bool:
        return bool(self._members[name])

    def index(self, name: str) -> Tensor:
        """[n] int64, on the device."""
        return self._indices[name]

    def chunks(self, name: str, size: int) -> Iterator[slice | Tensor]:
        """At most `size` lines at a time; neighbours as a slice, which copies and uploads nothing."""
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
    """Log-probabilities under the raw logits, of the L sequences that want them."""

    sampled: Tensor  # [L]
    top_ids: Tensor  # [L, N], best first; N is the most that any sequence wants
    top: Tensor  # [L, N]


class _RawLogprobs:
    """The raw log-probabilities of the sequences that want them."""

    def __init__(self, logits: Tensor, index: Tensor, needs: Sequence[SamplingNeeds]) -> None:
        self._index = index
        self._most = max(need.logprobs or 0 for need in needs)
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
    asked: tuple[int | None, ...]  # alternatives that each of the S sequences wants
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
        """Tokens and log-probabilities of the S sequences, in order; blocks until the device is done."""
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
