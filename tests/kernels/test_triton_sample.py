"""Greedy choice and draws without sorting against the sampler's own, token for token."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import pytest
import torch
from torch import Tensor

from saccade.kernels.jit import jit, tl
from saccade.kernels.sampling import top_k_top_p as draw
from saccade.kernels.sampling.greedy import GreedyTuning, greedy, greedy_triton
from saccade.kernels.sampling.threshold import edge_of
from saccade.kernels.sampling.top_k_top_p import DrawTuning, draw_triton
from saccade.sampling import rng as noise
from saccade.sampling.filters import scale_and_mask
from tests.kernels.buffers import EXACT, PLACES, Place, poison

# Pieces, tiles and lists so small that a line of 150 tokens has several of each.
SMALL = DrawTuning(piece=64, tile=64, every=5, room=256, block=64)
NO_ROOM = SMALL._replace(room=8)  # every list overflows: whole lines are searched
SMALL_GREEDY = GreedyTuning(piece=64, tile=64)


@pytest.mark.parametrize("vocab", [1, 5, 1000])
@pytest.mark.parametrize("place", PLACES)
def test_greedy_is_the_first_of_the_best(place: Place, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = place.randn(4, vocab + 3)[:, :vocab]
    logits[1] = 7.0  # all equal
    logits[2, vocab // 2 :] = 9.0
    poison(monkeypatch)
    tokens, sound = greedy_triton(logits, SMALL_GREEDY)
    assert tokens.tolist()[1:3] == [0, vocab // 2]
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.amax(-1, keepdim=True))
    assert torch.equal(greedy_triton(logits)[0], tokens)
    assert bool(sound.all())


@pytest.mark.parametrize("place", PLACES)
def test_rows_with_nan_or_infinity_are_flagged(place: Place) -> None:
    logits = place.randn(5, 130)
    logits[1, 120], logits[2, 0], logits[4] = torch.nan, torch.inf, -torch.inf
    for tokens, sound in (greedy_triton(logits, SMALL_GREEDY), greedy(logits)):
        assert sound.tolist() == [True, False, False, True, False]
        assert bool((tokens < 130).all())
    words = torch.zeros(5, 9, dtype=torch.float64, device=place.device)
    words[:, :3] = torch.tensor([1.0, 0.0, 0.9])
    rows = torch.arange(5, dtype=torch.int32, device=place.device)
    tokens, sound = draw_triton(logits, rows, words, torch.zeros_like(rows).long(), SMALL)
    assert sound.tolist() == [True, False, False, True, False]
    assert bool(((tokens >= 0) & (tokens < 130)).all())


def parameters(settings: Tensor, seeds: list[int]) -> Tensor:
    """The sampler's table; settings [n, 4]: temperature, top_k, top_p, min_p."""
    made = torch.zeros(len(settings), 9, dtype=torch.float64)
    made[:, :4] = settings
    made[:, 7:] = torch.tensor([noise.key(seed) for seed in seeds], dtype=torch.float64)
    return made


def reference(logits: Tensor, kind: str, table: Tensor, outputs: Tensor) -> Tensor:
    """The sampler's own steps."""
    table = table.to(logits.device)
    scaled = scale_and_mask(logits.float().clone(), table, kind, int(table[:, 1].max()))
    words = noise.words(table[:, 7:].long(), outputs.to(logits.device))
    bits = noise.random_bits(noise.spread(logits.shape[1], logits.device), words)
    return scaled.sub_(noise.log_exponential(bits)).argmax(-1)


def run(logits: Tensor, table: Tensor, outputs: Tensor, tuning: DrawTuning | None) -> Tensor:
    """The lines' parameters stand in reversed order in the table, one of nobody's among them."""
    count, device = len(logits), logits.device
    rows = torch.arange(count, 0, -1, dtype=torch.int32, device=device)
    spread = torch.cat((torch.full((1, 9), torch.nan, dtype=torch.float64), table.flip(0)))
    return draw_triton(logits, rows, spread.to(device), outputs.to(device), tuning)[0]


KINDS = {
    "free": (0, 1.0, 0.0),
    "free min_p": (0, 1.0, 0.05),
    "free min_p all": (0, 1.0, 1.0),  # the best alone
    "top_p": (0, 0.9, 0.0),
    "top_p tight": (0, 0.05, 0.0),
    "top_p loose": (0, 0.9999, 0.0),
    "top_k": (5, 1.0, 0.0),
    "top_k one": (1, 1.0, 0.0),
    "top_k top_p": (40, 0.7, 0.01),
}


CASES = [(kind, spread, SMALL) for kind in KINDS for spread in (0.3, 3.0)]
CASES += [("top_p", 0.0, SMALL), ("top_k one", 0.0, SMALL)]  # all alike
CASES += [("top_p", 0.3, NO_ROOM), ("top_k top_p", 0.3, NO_ROOM)]


@pytest.mark.parametrize(("kind", "spread", "tuning"), CASES)
@pytest.mark.parametrize("place", EXACT)
def test_draws_equal_the_sampler(
    place: Place, kind: str, spread: float, tuning: DrawTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab = 4, 150
    top_k, top_p, min_p = KINDS[kind]
    logits = place.randn(rows, vocab) * spread
    logits[1].round_()  # many ties
    logits[2, ::2] = -torch.inf
    settings = torch.tensor([[0.3 + row, top_k, top_p, min_p] for row in range(rows)], dtype=torch.float64)
    table, outputs = parameters(settings, [977 * row for row in range(rows)]), torch.arange(rows)
    expected = reference(logits, kind.split()[0], table, outputs)
    poison(monkeypatch)
    table[3, 0] = 0  # greedy
    expected[3] = logits[3].argmax()
    assert run(logits, table, outputs, tuning).tolist() == expected.tolist()


@pytest.mark.parametrize("place", EXACT)
def test_rows_of_many_tiles_draw_as_the_sampler(place: Place) -> None:
    logits = place.randn(3, 800) * torch.tensor([[0.1], [1.0], [4.0]], device=place.device)
    settings = torch.tensor([[0.7, 0, 1.0, 0], [1.3, 0, 0.9, 0], [0.4, 30, 0.95, 0.001]], dtype=torch.float64)
    table, outputs = parameters(settings, [5, 6, 7]), torch.arange(3)
    expected = [
        int(reference(logits[row : row + 1], kind, table[row : row + 1], outputs[row : row + 1]))
        for row, kind in enumerate(["free", "top_p", "top_k"])
    ]
    tuning = DrawTuning(piece=512, tile=64, every=10, room=1024, block=512)
    assert run(logits, table, outputs, tuning).tolist() == expected


class Searched:
    """Stands for the kernel that searches whole lines; knows which ones it was told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernel, self.late = draw._search_kernel, torch.empty(0)
        monkeypatch.setattr(draw, "_search_kernel", self)

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(
            logits: Tensor, frame: Tensor, numbers: Tensor, late: Tensor, *args: object, **more: object
        ):
            self.late = late.clone()
            self._kernel[grid](logits, frame, numbers, late, *args, **more)

        return launch


@pytest.mark.parametrize("place", EXACT)
def test_guessed_and_searched_rows_in_one_batch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of any form: who is listed and who is searched is what the line is like, not its neighbours."""
    logits = place.randn(10, 2000)
    misled = torch.arange(2000, device=place.device) % 512 % 10 == 0  # the sampled ones
    logits[1] *= 8  # peaked
    logits[2] = 1.5  # all alike: no list has room
    logits[3, ::3] = -torch.inf
    logits[4] = -9.0 + logits[4] * 0.01
    logits[4, 77] = 9.0  # one hot
    logits[5] = torch.where(misled, -20.0, logits[5])  # much is nearer than it seems
    logits[6] = torch.where(misled, logits[6], -20.0)  # and nothing
    logits[7] = (logits[7] * 3).round()  # ties, at the bound too
    settings = torch.tensor([[0.9, 0, 0.5, 0.0]] * 10, dtype=torch.float64)
    settings[8] = torch.tensor([1.1, 400, 0.8, 0.0])
    settings[9] = torch.tensor([1.3, 0, 1.0, 0.0])
    table, outputs = parameters(settings, list(range(10))), torch.arange(10)
    expected = [
        int(reference(logits[row : row + 1], kind, table[row : row + 1], outputs[row : row + 1]))
        for row, kind in enumerate(["top_p"] * 8 + ["top_k", "free"])
    ]
    tuning, searched = DrawTuning(512, 512, 10, 1024, 512), Searched(monkeypatch)
    poison(monkeypatch)
    assert run(logits, table, outputs, tuning).tolist() == expected
    assert searched.late.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 0]
    some = slice(7, 9)
    assert run(logits[some], table[some], outputs[some], tuning).tolist() == expected[some]


@pytest.mark.parametrize("place", EXACT)
def test_zeros_of_either_sign_are_alike(place: Place) -> None:
    logits = -place.randn(6, 150).abs() * 0.1
    logits[:, 3] = -0.0  # the best, as no 0 of a later tile is more
    logits[:, 70:80] = 0.0
    table = parameters(torch.tensor([[1.0, 9, 1.0, 0.0]] * 6, dtype=torch.float64), list(range(6)))
    outputs = torch.arange(6)
    expected = reference(logits, "top_k", table, outputs)
    assert torch.equal(run(logits, table, outputs, SMALL._replace(piece=128)), expected)


@pytest.mark.parametrize("place", EXACT)
def test_few_are_listed_of_the_many_that_are_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose noise cannot win is not listed, and the winner always is: many draws of one line."""
    draws, room = 12, 64
    logits = place.randn(1, 2000).repeat(draws, 1) * 0.5
    settings = torch.tensor([[1.0, 0, 1.0, 0.0]] * draws, dtype=torch.float64)
    table, outputs = parameters(settings, list(range(draws))), torch.arange(draws)
    searched = Searched(monkeypatch)
    tokens = run(logits, table, outputs, DrawTuning(512, 512, 4, room, 64))
    assert tokens.tolist() == reference(logits, "free", table, outputs).tolist()
    assert len(set(tokens.tolist())) > draws // 2
    assert not searched.late.any()


@jit
def _edges_kernel(keys, temperatures, edges, COUNT: tl.constexpr):  # noqa: N803
    place = tl.arange(0, COUNT)
    for row in range(3):
        temperature = tl.load(temperatures + row)
        tl.store(edges + row * COUNT + place, edge_of(tl.load(keys + place), temperature))


@pytest.mark.parametrize("place", EXACT)
def test_gaps_below_an_edge_are_those_of_keys_below_its_key(place: Place) -> None:
    """Exactly: of the edge and its neighbours, which key each has once divided."""
    values = place.randn(62).abs() * 10.0 ** torch.arange(-31, 31, device=place.device)
    keys = torch.cat(
        (values.view(torch.int32), torch.tensor([0, 0x7F800001], dtype=torch.int32, device=place.device))
    )
    temperatures = torch.tensor([0.3, 1.0, 1.7], device=place.device)
    edges = torch.empty(3, 64, dtype=torch.int32, device=place.device)
    _edges_kernel[(1,)](keys, temperatures, edges, COUNT=64)
    for edge, temperature in zip(edges, temperatures, strict=True):
        for off in (-2, -1, 0, 1):
            gap = (edge + off).clamp(0, 0x7F800000)
            key = (gap.view(torch.float32) / temperature).view(torch.int32)
            assert torch.equal(key < keys, gap < edge)


@pytest.mark.parametrize("place", PLACES)
def test_draws_of_any_dtype_are_those_of_its_values(place: Place) -> None:
    logits = place.randn(2, 130)
    settings = torch.tensor([[1.0, 0, 0.8, 0.0], [1.0, 9, 1.0, 0.0]], dtype=torch.float64)
    table, outputs = parameters(settings, [3, 4]), torch.arange(2)
    assert torch.equal(run(logits, table, outputs, SMALL), run(logits.float(), table, outputs, SMALL))


@pytest.mark.parametrize("place", EXACT)
def test_kept_tokens_are_drawn_and_no_others(place: Place) -> None:
    """Many draws of one line: what top-k keeps all comes up, and nothing else."""
    draws = 12
    logits = place.randn(1, 100).repeat(draws, 1)
    settings = torch.tensor([[9.0, 3, 1.0, 0.0]] * draws, dtype=torch.float64)
    table, outputs = parameters(settings, list(range(draws))), torch.zeros(draws, dtype=torch.int64)
    drawn = set(run(logits, table, outputs, SMALL).tolist())
    assert drawn == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("place", PLACES[2:])
def test_draws_over_a_real_vocabulary(place: Place) -> None:
    rows, vocab = 64, 151936
    outputs = torch.arange(rows)
    for size in (0.2, 1.0, 8.0):
        logits = place.randn(rows, vocab) * size
        for kind, (top_k, top_p, min_p) in KINDS.items():
            table = parameters(
                torch.tensor([[0.9, top_k, top_p, min_p]] * rows, dtype=torch.float64), list(range(rows))
            )
            expected = reference(logits, kind.split()[0], table, outputs)
            agree = (run(logits, table, outputs, None) == expected).float().mean()
            assert float(agree) >= 0.98, f"{kind} at {size}: sums round differently on the very edge alone"


def test_wrappers_run_the_reference_on_the_cpu_and_refuse_what_does_not_fit() -> None:
    logits = torch.randn(3, 9)
    assert torch.equal(greedy(logits)[0], logits.argmax(-1))
    with pytest.raises(ValueError, match=r"\(9,\)"):
        greedy(logits[0])
    rows, outputs = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="parameters must be"):
        draw_triton(logits, rows, torch.zeros(3, 4, dtype=torch.float64), outputs)
    with pytest.raises(ValueError, match="outputs must be"):
        draw_triton(logits, rows, torch.zeros(3, 9, dtype=torch.float64), rows)
