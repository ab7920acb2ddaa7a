"""Each sampling parameter against transformers or plain numpy; the noise against its distribution."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from saccade.request import Sampling, TokenLogprobs
from saccade.sampling import rng as noise
from saccade.sampling import sampler as sampler_room
from saccade.sampling.sampler import Sampler, SamplingNeeds
from saccade.step_plan import ScheduledSequence, SlotInit

CPU = torch.device("cpu")
VOCAB = 50
GREEDY = Sampling(temperature=0.0)


def sampler(*entries: SlotInit, vocab: int = VOCAB, rows: int = 64) -> Sampler:
    made = Sampler(rows, vocab, CPU)
    for entry in entries:
        made.enter(entry)
    return made


def enter(
    row: int, sampling: Sampling, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> SlotInit:
    return SlotInit(slot=row, sampling=sampling, seed=seed, prompt=tuple(prompt), output=tuple(output))


def step(
    made: Sampler, logits: Tensor, rows: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One sampling step on a copy of the logits."""
    plan = [
        ScheduledSequence(
            seq_id=row,
            slot=row,
            start=position,
            num_tokens=1,
            tokens=(0,),
            positions=np.zeros((3, 1), dtype=np.float32),
            spans=(),
            sample=True,
            output_position=position,
        )
        for row, position in zip(rows, positions, strict=True)
    ]
    output = made.sample(logits.clone(), plan, torch.tensor(rows), torch.tensor(positions))
    assert output.tokens.dtype == torch.int64
    return output.to_host().wait()


def draws(sampling: Sampling, logits: Tensor, count: int, seed: int = 1) -> list[int]:
    """The tokens of `count` consecutive output positions, all under the same logits."""
    made = sampler(enter(0, sampling, seed), vocab=len(logits))
    return step(made, logits.expand(count, -1), [0] * count, range(count))[0]


def chi_square_limit(freedom: int) -> float:
    """About the 99.99% quantile (Wilson and Hilferty's cube)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def distribution(tokens: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    return np.bincount(tokens, minlength=vocab).astype(float)


def logits_of(seed: int, lines: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(lines, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# greedy and temperature


def test_greedy_takes_the_largest_logit() -> None:
    logits = logits_of(0, lines=8)
    made = sampler(*(enter(row, GREEDY) for row in range(8)))
    assert step(made, logits, range(8), [0] * 8)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    logits = logits_of(1)[0]
    tokens = draws(Sampling(temperature=temperature), logits, 20_000)
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * len(tokens)
    counts = distribution(tokens)
    common = expected >= 5  # the others together are one class
    merged = [np.append(part[common], part[~common].sum() + 1e-9) for part in (counts, expected)]
    assert chi_square(*merged) < chi_square_limit(int(common.sum()))


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = logits_of(2)[0]
    for temperature in (1e-4, 1e-6, 1e-300):
        assert set(draws(Sampling(temperature=temperature), logits, 50)) == {int(logits.argmax())}


# the rules that bar tokens, against transformers


def allowed_by(sampling: Sampling, logits: Tensor) -> Tensor:
    """Which tokens transformers' warpers leave, in transformers' order."""
    scores = logits[None] / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(top_k=sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(top_p=sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(min_p=sampling.min_p)(None, scores)
    return scores[0]


RULES = [
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_k=VOCAB + 5),
    Sampling(top_p=0.1),
    Sampling(top_p=0.8),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.05),
    Sampling(min_p=0.5, temperature=3.0),
    Sampling(top_k=20, top_p=0.8, temperature=0.7),
    Sampling(top_k=12, top_p=0.95, min_p=0.1, temperature=1.7),
]


@pytest.mark.parametrize("sampling", RULES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_draws_follow_the_distribution_transformers_leaves(sampling: Sampling, seed: int) -> None:
    logits = logits_of(seed)[0]
    tokens = draws(sampling, logits, 4000, seed)
    expected = torch.softmax(allowed_by(sampling, logits).double(), -1).numpy() * len(tokens)
    counts = distribution(tokens)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    merged = [np.append(part[common], part[~common].sum() + 1e-9) for part in (counts, expected)]
    if common.sum() > 1:
        assert chi_square(*merged) < chi_square_limit(int(common.sum()))


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_k=3, top_p=0.7)], ids=str)
def test_tokens_tied_with_the_last_of_top_k_stay_in(sampling: Sampling) -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[[4, 9]] = 2.0
    logits[[1, 20, 30, 40]] = 1.0  # four tie for the third place
    # transformers' top-p keeps whichever of the ties its sort puts first; we keep all or none
    least = logits[allowed_by(sampling, logits).isfinite()].min()
    expected = (logits >= least).nonzero().flatten().tolist()
    assert len(expected) == 6
    assert sorted(set(draws(sampling, logits, 2000))) == expected


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_top_p_is_the_same_by_candidates_and_by_sorting(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(3, vocab=3000, scale=scale)[0]  # nearly flat: candidates cannot reach the mass
    sampling = Sampling(top_p=0.9)
    tokens = draws(sampling, logits, 300)
    monkeypatch.setattr("saccade.sampling.filters._CANDIDATES", 3000)
    assert draws(sampling, logits, 300) == tokens


# bias, minimum, penalties


def test_logit_bias_is_added_and_ids_beyond_the_head_have_no_effect() -> None:
    logits = logits_of(4)
    best = int(logits.argmax())
    made = sampler(
        enter(0, Sampling(temperature=0.0, logit_bias={best: -100.0})),
        enter(1, Sampling(temperature=0.0, logit_bias={7: 100.0, VOCAB: 100.0, -1: 100.0})),
        enter(2, Sampling(temperature=0.0, logit_bias={0: 0.5, 3: 100.0, 5: 150.0})),
    )
    expected = logits[0].clone()
    expected[best] -= 100
    assert step(made, logits.expand(3, -1), [0, 1, 2], [0] * 3)[0] == [int(expected.argmax()), 7, 5]


def test_a_shorter_bias_list_leaves_nothing_of_the_one_before() -> None:
    logits = logits_of(5)
    made = sampler(enter(0, Sampling(temperature=0.0, logit_bias={3: 100.0, 4: 90.0, 5: 80.0})))
    made.enter(enter(0, Sampling(temperature=0.0, logit_bias={8: 70.0})))
    assert step(made, logits, [0], [0])[0] == [8]


def test_stop_tokens_are_masked_below_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 30.0, 20.0, 10.0
    sampling = Sampling(temperature=0.0, min_tokens=3, stop_token_ids=(5, 6, VOCAB + 9))
    made = sampler(enter(0, sampling), enter(1, Sampling(min_tokens=3, stop_token_ids=(5,), top_k=1)))
    assert [step(made, logits, [0], [position])[0] for position in range(5)] == [[7], [7], [7], [5], [5]]
    assert [step(made, logits, [1], [position])[0] for position in (0, 2, 3)] == [[6], [6], [5]]


def penalised(logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """transformers' repetition penalty, then frequency and presence as the OpenAI API defines them."""
    processor = RepetitionPenaltyLogitsProcessor(penalty=sampling.repetition_penalty)
    scores = processor(torch.tensor([[*prompt, *output]]), logits[None].clone())[0].numpy()
    counts = distribution(output)
    made: np.ndarray = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return made


PENALTIES = [
    Sampling(temperature=0.0, repetition_penalty=1.5),
    Sampling(temperature=0.0, repetition_penalty=0.7),
    Sampling(temperature=0.0, frequency_penalty=0.9),
    Sampling(temperature=0.0, presence_penalty=1.1),
    Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=-0.3),
]


@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
def test_penalties_follow_prompt_and_output(sampling: Sampling) -> None:
    prompt = [1, 2, 3, 3, 10]
    lines = logits_of(6, lines=30, scale=1.0)
    made = sampler(enter(20, sampling, prompt=prompt))
    output: list[int] = []
    for position, logits in enumerate(lines):
        expected = int(penalised(logits, sampling, prompt, output).argmax())
        assert step(made, logits[None], [20], [position])[0] == [expected]
        output.append(expected)
    assert len(set(output)) < len(output)  # something was repeated, so counts mattered


def test_a_preempted_sequence_samples_as_if_it_had_stayed() -> None:
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.5, temperature=0.8)
    lines = logits_of(7, lines=40)
    stayed = sampler(enter(3, sampling, 99, prompt=[4, 5]))
    output = [step(stayed, lines[i : i + 1], [3], [i])[0][0] for i in range(20)]
    moved = sampler(enter(9, PENALTIES[0], prompt=[30, 31], output=[1, 2]))
    moved.enter(enter(9, sampling, 99, prompt=[4, 5], output=output))
    for i in range(20, 40):
        expected = step(stayed, lines[i : i + 1], [3], [i])[0]
        assert step(moved, lines[i : i + 1], [9], [i])[0] == expected


ASKED = (GREEDY, Sampling(temperature=0.7, top_k=3), Sampling(logit_bias={3: 9.0}), Sampling(min_p=0.2))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ASKED), st.integers(1, 2)), max_size=3),
        max_size=8,
    )
)
def test_a_slot_follows_its_last_parameters(
    calls: list[list[tuple[int, Sampling, int]]],
) -> None:
    """What a row was told is not told again: red when that is asked of another row, seed or holder."""
    made = Sampler(3, VOCAB, CPU)
    last: dict[int, SlotInit] = {}
    for call in calls:
        made.enter(*[enter(*one) for one in call])
        last |= {row: enter(row, sampling, seed) for row, sampling, seed in call}
    fresh = sampler(*last.values(), rows=3)
    assert torch.equal(made._parameters[:, 0], fresh._parameters[:, 0])
    rows = sorted(last)
    asked = [row for row in rows if made._needs[row] != SamplingNeeds()]  # the others are read no further
    assert torch.equal(made._parameters[asked], fresh._parameters[asked])
    lines = logits_of(3, lines=len(rows)) if rows else logits_of(3, lines=1)[:0]
    places = [4] * len(rows)
    assert step(made, lines, rows, places)[0] == step(fresh, lines, rows, places)[0]


def test_parameters_that_a_slot_has_are_not_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sampler(enter(0, GREEDY, 5), enter(1, PENALTIES[0], 5))
    sent: list[int] = []
    monkeypatch.setattr(made, "_set_slot", lambda entry: sent.append(entry.slot))
    made.enter(enter(0, GREEDY, 5, prompt=[1, 2]), enter(1, PENALTIES[0], 5, prompt=[1, 2]))
    assert sent == [1], "its penalties are of another prompt now"


def test_a_greedy_slot_that_was_greedy_before_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sampler(enter(0, GREEDY, 5), enter(1, Sampling(temperature=0.5), 5))
    sent: list[Tensor] = []

    def send(host: Tensor, device: torch.device) -> Tensor:
        sent.append(host)
        return host

    monkeypatch.setattr(sampler_room, "send", send)
    made.enter(enter(0, GREEDY, 6))
    assert not sent
    made.enter(enter(1, GREEDY, 6), enter(0, GREEDY, 7))
    assert sent[0].tolist() == [1], "it drew before"
    made.enter(enter(1, GREEDY, 8))
    assert len(sent) == 2


def test_parameters_whose_upload_failed_are_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = sampler(), enter(0, Sampling(temperature=0.5), 5)
    with monkeypatch.context() as broken:
        broken.setattr(sampler_room, "send", None)
        with pytest.raises(TypeError):
            made.enter(asked)
    made.enter(asked)
    assert torch.equal(made._parameters, sampler(asked)._parameters)


def test_token_counts_are_allocated_with_the_first_penalties() -> None:
    made = sampler(enter(0, Sampling()), enter(1, GREEDY))
    before = made.nbytes
    made.enter(enter(2, Sampling(presence_penalty=0.5)))
    assert made.nbytes > before


def test_prompt_ids_beyond_the_vocabulary_are_ignored() -> None:
    made = sampler(enter(0, PENALTIES[0], prompt=[VOCAB, VOCAB + 100, -1], output=[VOCAB]))
    logits = logits_of(8)
    assert step(made, logits, [0], [1])[0] == [int(logits.argmax())]


# what depends on what


MIXED = [
    GREEDY,
    Sampling(),
    Sampling(top_k=5),
    Sampling(top_p=0.7),
    Sampling(top_k=9, top_p=0.9, min_p=0.02, temperature=0.6),
    Sampling(repetition_penalty=1.4, presence_penalty=0.5),
    Sampling(logit_bias={3: 4.0, 9: -2.0}),
    Sampling(min_tokens=4, stop_token_ids=(1, 2)),
    Sampling(logprobs=3),
    Sampling(temperature=0.0, logprobs=0, frequency_penalty=1.0),
]


def test_a_request_draws_the_same_tokens_alone_and_among_others() -> None:
    lines = logits_of(10, lines=len(MIXED) * 6).view(6, len(MIXED), VOCAB)
    entries = [enter(i, sampling, seed=40 + i, prompt=[i, 3]) for i, sampling in enumerate(MIXED)]
    together = sampler(*entries)
    rng = np.random.default_rng(0)
    outputs: dict[int, list[int]] = {i: [] for i in range(len(MIXED))}
    for position in range(6):
        order = [int(i) for i in rng.permutation(len(MIXED))]
        tokens, _ = step(together, lines[position][order], order, [position] * len(order))
        for i, token in zip(order, tokens, strict=True):
            outputs[i].append(token)
    for i, sampling in enumerate(MIXED):
        row = 63 - i  # another row changes nothing either
        alone = sampler(enter(row, sampling, seed=40 + i, prompt=[i, 3]))
        drawn = [step(alone, lines[position, i][None], [row], [position])[0][0] for position in range(6)]
        assert drawn == outputs[i], sampling


def test_greedy_lines_stay_exact_beside_random_ones() -> None:
    lines = logits_of(11, lines=40)
    made = sampler(enter(0, GREEDY), enter(1, Sampling(temperature=5.0)))
    rows = [0, 1] * 20
    tokens, _ = step(made, lines, rows, range(40))
    assert tokens[::2] == lines[::2].argmax(-1).tolist()
    assert tokens[1::2] != lines[1::2].argmax(-1).tolist()


def test_chunking_does_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logits_of(12, lines=60)
    entries = [enter(i, MIXED[i % len(MIXED)], seed=i) for i in range(60)]
    whole = step(sampler(*entries), lines, range(60), [2] * 60)
    monkeypatch.setattr("saccade.sampling.sampler._CHUNK_VALUES", VOCAB * 3)
    assert step(sampler(*entries), lines, range(60), [2] * 60) == whole


def test_seeds_and_positions_draw_differently() -> None:
    flat = torch.zeros(VOCAB)
    assert draws(Sampling(), flat, 30, seed=1) == draws(Sampling(), flat, 30, seed=1)
    streams = {tuple(draws(Sampling(), flat, 30, seed=seed)) for seed in (0, 1, 2, 1 << 32, 1 << 63, -1)}
    assert len(streams) == 6
    assert all(len(set(stream)) > 15 for stream in streams)


# log-probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    lines = logits_of(13, lines=4)
    expected = lines.log_softmax(-1)
    made = sampler(
        enter(0, Sampling(temperature=0.1, logprobs=2, logit_bias={4: 50.0})),
        enter(1, Sampling(temperature=0.0)),
        enter(2, Sampling(temperature=0.0, logprobs=5)),
        enter(3, Sampling(temperature=2.0, logprobs=0, top_k=3)),
    )
    tokens, logprobs = step(made, lines, range(4), [0] * 4)
    assert tokens[0] == 4
    assert logprobs[1] is None
    for i, wanted in ((0, 2), (2, 5), (3, 0)):
        report = logprobs[i]
        assert report is not None
        assert report.sampled == pytest.approx(float(expected[i, tokens[i]]), abs=1e-6)
        values, ids = expected[i].topk(wanted)
        assert [token for token, _ in report.top] == ids.tolist()
        assert [value for _, value in report.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_more_logprobs_than_tokens_report_them_all() -> None:
    made = sampler(enter(0, Sampling(logprobs=VOCAB + 20)))
    report = step(made, logits_of(14), [0], [0])[1][0]
    assert report is not None
    assert len(report.top) == VOCAB


# noise


def test_bits_are_those_of_whole_number_arithmetic() -> None:
    mask = (1 << 32) - 1

    def mixed(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D & mask
        word = (word ^ word >> 15) * 0x846CA68B & mask
        return word ^ word >> 16

    golden, third = 0x9E3779B9, 0x2C1B3C6D
    seeds = [0, 5, -1, 1 << 31, 0x12345678DEADBEEF]
    positions = [0, 1, 77, (1 << 31) - 1, 3]
    keys = torch.tensor([noise.key(seed) for seed in seeds])
    made = noise.random_bits(noise.spread(40, CPU), noise.words(keys, torch.tensor(positions)))
    for line, seed, position in zip(made.tolist(), seeds, positions, strict=True):
        step = position * golden & mask
        low = mixed(mixed(seed & mask) ^ step)
        high = mixed(mixed((seed >> 32 & mask) + third & mask) ^ step)
        first, second = mixed(low ^ high * third & mask), mixed(high ^ low * third & mask)
        for token, bits in enumerate(line):
            word = (mixed(token * golden & mask) ^ first) * 0x7FEB352D & mask
            word = ((word ^ word >> 15) + second) * 0x846CA68B & mask
            word = (word ^ word >> 13) * third & mask
            assert bits & mask == word ^ word >> 16


@pytest.mark.parametrize("along", ["seeds", "high halves", "positions", "tokens"])
@pytest.mark.parametrize("shift", [0, 8, 16, 23])
def test_bits_are_uniform_along_every_axis(along: str, shift: int) -> None:
    count = 1 << 16
    series = torch.arange(count)
    vocab = count if along == "tokens" else 1
    seeds = {"seeds": range(count), "high halves": range(0, count << 32, 1 << 32)}.get(along, [3] * count)
    keys = torch.tensor([noise.key(seed) for seed in seeds])
    words = noise.words(keys, series if along == "positions" else torch.full_like(series, 5))
    bits = noise.random_bits(noise.spread(vocab, CPU), words[:1] if along == "tokens" else words).flatten()
    bytes_ = (bits >> shift & 0xFF).numpy()
    pairs = bytes_[:-1].astype(int) // 16 * 16 + bytes_[1:] // 16  # neighbours are independent too
    for values in (bytes_, pairs):
        counts = np.bincount(values, minlength=256)
        assert chi_square(counts, np.full(256, len(values) / 256)) < chi_square_limit(255)


def test_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0, 1, -1, (1 << 31) - 1, -(1 << 31)], dtype=torch.int32)
    assert bool(noise.log_exponential(ends.clone()).isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_draws_the_same_tokens_without_waiting() -> None:
    device = torch.device("cuda")
    lines = logits_of(15, lines=60)
    entries = [enter(i, MIXED[i % len(MIXED)], seed=i, prompt=[3], output=[3, 4]) for i in range(60)]
    expected = step(sampler(*entries), lines, range(60), [2] * 60)[0]
    made = Sampler(64, VOCAB, device)
    plan = [
        ScheduledSequence(
            i, i, 0, 1, (0,), np.zeros((3, 1), dtype=np.float32), (), sample=True, output_position=2
        )
        for i in range(60)
    ]
    logits, rows, positions = (
        lines.to(device),
        torch.arange(60, device=device),
        torch.full((60,), 2, device=device),
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for entry in entries:
            made.enter(entry)
        host = made.sample(logits, plan, rows, positions).to_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert host.wait()[0] == expected
