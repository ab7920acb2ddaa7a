"""Greedy choice and draws without sorting against the sampler's own, token for token."""

import pytest
import torch
from torch import Tensor

from saccade.kernels.sample import ArgmaxTuning, DrawTuning, argmax, argmax_triton, draw_triton
from saccade.runtime import noise
from saccade.runtime.bars import scale_and_bar
from tests.kernels.places import EXACT, PLACES, Place, poison

SMALL = DrawTuning(block=128, tile=256, room=64)


@pytest.mark.parametrize("vocab", [1, 5, 1000])
@pytest.mark.parametrize("place", PLACES)
def test_greedy_is_the_first_of_the_best(place: Place, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = place.randn(4, vocab + 3)[:, :vocab]
    logits[1] = 7.0  # all equal
    logits[2, vocab // 2 :] = 9.0
    poison(monkeypatch)
    tokens = argmax_triton(logits, ArgmaxTuning(block=256))
    assert tokens.tolist()[1:3] == [0, vocab // 2]
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.amax(-1, keepdim=True))
    assert torch.equal(argmax_triton(logits), tokens)


def twin(logits: Tensor, kind: str, settings: Tensor, words: Tensor) -> Tensor:
    """The sampler's own steps; settings [n, 4]: temperature, top_k, top_p, min_p."""
    parameters = torch.zeros(len(logits), 9, dtype=torch.float64, device=logits.device)
    parameters[:, :4] = settings
    scaled = scale_and_bar(logits.float().clone(), parameters, kind, int(settings[:, 1].max()))
    bits = noise.random_bits(noise.spread(logits.shape[1], logits.device), words)
    return scaled.sub_(noise.log_exponential(bits)).argmax(-1)


def run(logits: Tensor, settings: Tensor, words: Tensor, tuning: DrawTuning) -> Tensor:
    rows, device = len(logits), logits.device
    tokens = torch.full((rows,), -7, dtype=torch.int64, device=device)
    temperature, top_k, top_p, min_p = settings.to(device).float().unbind(1)
    parts = [part.contiguous() for part in (temperature, top_k.int(), top_p, min_p)]
    index = torch.arange(rows - 1, -1, -1, device=device)
    draw_triton(logits, index, parts[0], parts[1], parts[2], parts[3], words, tokens, tuning)
    return tokens


KINDS = {
    "free": (0, 1.0, 0.0),
    "free min_p": (0, 1.0, 0.05),
    "top_p": (0, 0.9, 0.0),
    "top_p tight": (0, 0.05, 0.0),
    "top_p loose": (0, 0.9999, 0.0),
    "top_k": (5, 1.0, 0.0),
    "top_k one": (1, 1.0, 0.0),
    "top_k top_p": (40, 0.7, 0.01),
}


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", EXACT)
def test_draws_are_the_sampler_s(
    place: Place, kind: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab = 3, 300
    top_k, top_p, min_p = KINDS[kind]
    logits = place.randn(rows, vocab) * spread
    logits[1].round_()  # many ties
    logits[2, ::2] = -torch.inf
    settings = torch.tensor([[0.3 + row, top_k, top_p, min_p] for row in range(rows)], dtype=torch.float64)
    positions = torch.arange(rows)
    keys = torch.tensor([noise.key(977 * row) for row in range(rows)])
    words = noise.words(keys, positions).to(place.device)
    expected = twin(logits, kind.split()[0], settings.to(place.device), words)
    poison(monkeypatch)
    assert run(logits, settings, words, SMALL).tolist() == expected.tolist()


@pytest.mark.parametrize("place", EXACT)
def test_kept_tokens_are_drawn_and_no_others(place: Place) -> None:
    """Many draws of one line: what top-k keeps all comes up, and nothing else."""
    draws = 24
    logits = place.randn(1, 100).repeat(draws, 1)
    settings = torch.tensor([[9.0, 3, 1.0, 0.0]] * draws, dtype=torch.float64)
    words = noise.words(
        torch.tensor([noise.key(seed) for seed in range(draws)]), torch.zeros(draws, dtype=torch.int64)
    )
    drawn = set(run(logits, settings, words.to(place.device), SMALL).tolist())
    assert drawn == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("place", PLACES[2:])
def test_draws_over_a_real_vocabulary(place: Place) -> None:
    rows, vocab = 64, 151936
    words = noise.words(torch.tensor([noise.key(row) for row in range(rows)]), torch.arange(rows)).to(
        place.device
    )
    for size in (0.2, 1.0, 8.0):
        logits = place.randn(rows, vocab) * size
        for kind, (top_k, top_p, min_p) in KINDS.items():
            settings = torch.tensor([[0.9, top_k, top_p, min_p]] * rows, dtype=torch.float64)
            expected = twin(logits, kind.split()[0], settings.to(place.device), words)
            agree = (run(logits, settings, words, DrawTuning()) == expected).float().mean()
            assert float(agree) >= 0.98, f"{kind} at {size}: sums round differently on the very edge alone"


def test_wrappers_run_the_twin_on_the_cpu_and_refuse_what_does_not_fit() -> None:
    logits = torch.randn(3, 9)
    assert torch.equal(argmax(logits), logits.argmax(-1))
    with pytest.raises(ValueError, match=r"\(9,\)"):
        argmax(logits[0])
    one, index, words = torch.ones(3), torch.arange(3), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="top_k must be"):
        draw_triton(logits, index, one, one, one, one, words, index)
