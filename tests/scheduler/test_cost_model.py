"""The cost model: what it learns, how fast, and what cannot mislead it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.cost_prior import CPU, H200, ModelSize, coefficients
from saccade.errors import ConfigError
from saccade.scheduler.cost_model import Coefficients, CostModel, Work, pairs

QWEN3_VL_8B = ModelSize(36, 32, 8, 128, 4096, 151_936, 7_568_000_000, 2, 27, 1152, 425_000_000)
PRIOR = coefficients(QWEN3_VL_8B, H200)
# A machine that is nothing like its prior: every part slower by its own factor.
TRUTH = PRIOR.times((1.6, 4.0, 3.0, 1.4, 5.0, 1.3, 2.5, 6.0, 1.5, 2.0))


def some_work(draw: Random) -> Work:
    """A step as the scheduler makes them: streams, at times a prompt, at times an image."""
    work = Work()
    for _ in range(draw.randrange(1, 120)):
        work.add_row(draw.randrange(100, 3000), 1)
    if draw.random() < 0.4:
        work.add_row(draw.randrange(0, 2000), draw.randrange(2, 1500))
    if draw.random() < 0.15:
        work.add_view(draw.choice([784, 4096, 8160]), draw.choice([1.0, 1.0, 3 / 27, 12 / 27]))
    return work


def text_only(draw: Random) -> Work:
    work = some_work(draw)
    return replace(work, encoding=0.0, patches=0.0, patch_pairs=0.0)


def teach(model: CostModel, truth: CostModel, steps: int, draw: Random, noise: float = 0.0) -> None:
    for _ in range(steps):
        work = some_work(draw)
        model.observe(model.quantities(work), truth.predict(work) * (1 + noise * draw.uniform(-1, 1)))


def mean_error(model: CostModel, truth: CostModel, make: object = some_work, steps: int = 300) -> float:
    draw = Random(99)
    works = [some_work(draw) if make is some_work else text_only(draw) for _ in range(steps)]
    return sum(abs(model.predict(work) / truth.predict(work) - 1) for work in works) / steps


def test_from_a_wrong_prior_the_error_is_small_after_a_few_hundred_steps() -> None:
    model, truth = CostModel(PRIOR), CostModel(TRUTH, learning=False)
    assert mean_error(model, truth) > 0.3
    teach(model, truth, 300, Random(1), noise=0.05)
    assert mean_error(model, truth) < 0.05
    assert model.error < 0.08  # what it says of itself


def test_a_prior_of_another_kind_of_machine_is_overcome() -> None:
    model, truth = CostModel(coefficients(QWEN3_VL_8B, CPU)), CostModel(TRUTH, learning=False)
    teach(model, truth, 1500, Random(1), noise=0.03)
    assert mean_error(model, truth) < 0.15


def test_a_stall_now_and_then_changes_little() -> None:
    model, truth, draw = CostModel(PRIOR), CostModel(TRUTH, learning=False), Random(2)
    for _ in range(600):
        work = some_work(draw)
        stalled = 15.0 if draw.random() < 0.03 else 1.0
        model.observe(model.quantities(work), truth.predict(work) * stalled)
    assert mean_error(model, truth) < 0.06


def test_a_machine_that_slows_down_is_followed() -> None:
    model, truth = CostModel(PRIOR), CostModel(TRUTH, learning=False)
    teach(model, truth, 500, Random(3))
    slower = CostModel(TRUTH.times((1.5,) * 10), learning=False)
    teach(model, slower, 1500, Random(4))
    assert mean_error(model, slower) < 0.06


def test_a_long_time_of_text_does_not_unlearn_what_images_cost() -> None:
    model, truth, draw = CostModel(PRIOR), CostModel(TRUTH, learning=False), Random(5)
    teach(model, truth, 500, draw)
    for _ in range(5000):
        work = text_only(draw)
        model.observe(model.quantities(work), truth.predict(work))
    assert mean_error(model, truth) < 0.05


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), max_size=60))
def test_costs_stay_finite_and_never_negative_whatever_is_observed(told: list[tuple[int, float]]) -> None:
    model = CostModel(PRIOR)
    for seed, milliseconds in told:
        model.observe(model.quantities(some_work(Random(seed))), milliseconds)
    assert all(0 <= part < float("inf") for part in model.coefficients.parts)


def test_more_work_never_costs_less() -> None:
    model, truth = CostModel(PRIOR), CostModel(TRUTH, learning=False)
    teach(model, truth, 200, Random(6), noise=0.3)
    work = some_work(Random(7))
    predicted = [model.predict(work)]
    for start, count in ((500, 1), (0, 64), (64, 64)):
        work.add_row(start, count)
        predicted.append(model.predict(work))
    work.add_view(784)
    predicted.append(model.predict(work))
    assert predicted == sorted(predicted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    limit=st.floats(3, 60), start=st.integers(0, 4000), most=st.integers(1, 8192), rows=st.integers(0, 200)
)
def test_tokens_within_a_limit_are_as_many_as_fit_and_no_more(
    limit: float, start: int, most: int, rows: int
) -> None:
    model = CostModel(PRIOR)
    work = Work(rows=rows, context=rows * 700)
    count = model.tokens_within(limit, work, start, most)
    assert 0 <= count <= most

    def cost(tokens: int) -> float:
        return model.predict(replace(work, tokens=tokens, pairs=pairs(start, tokens)))

    if count:
        assert cost(count) <= limit
    if count < most:
        assert cost(count + 1) > limit


def test_several_steps_at_once_are_the_sum_of_their_quantities() -> None:
    model, draw = CostModel(PRIOR), Random(8)
    first, second = some_work(draw), some_work(draw)
    both = tuple(map(sum, zip(model.quantities(first), model.quantities(second), strict=True)))
    assert model.price(both) == pytest.approx(model.predict(first) + model.predict(second))


def test_a_model_that_does_not_learn_stays_as_it_is() -> None:
    model = CostModel(PRIOR, learning=False)
    teach(model, CostModel(TRUTH, learning=False), 50, Random(9))
    assert model.coefficients == PRIOR
    assert model.observations == 50


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_cost_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="'pair'"):
        replace(PRIOR, pair=value)


# The prior, against the floors of the H200 that were worked out by hand


def test_the_floor_of_a_decode_step_is_reading_the_weights() -> None:
    model = CostModel(PRIOR)
    assert model.predict(Work(rows=1, context=640)) == pytest.approx(3.35, abs=0.1)  # 3.25 and the launch
    assert model.predict(Work(rows=128, context=128 * 640)) == pytest.approx(5.9, abs=0.3)


def test_a_large_step_is_bound_by_arithmetic_from_the_ridge_on() -> None:
    assert PRIOR.ridge == pytest.approx(644e12 / 4.69e12)
    model = CostModel(PRIOR)
    work = Work(tokens=8192, pairs=pairs(0, 8192))
    matrices = 2 * QWEN3_VL_8B.parameters * 8192 / 644e12 * 1e3
    assert matrices < model.predict(work) < 1.4 * matrices


def test_the_floor_of_a_new_image_is_about_what_the_chip_allows() -> None:
    """36 ms for 1024 x 1024 and 64 text tokens: 4,096 patches, 1,088 tokens."""
    work = Work(tokens=1088, pairs=pairs(0, 1088))
    work.add_view(4096)
    assert CostModel(PRIOR).predict(work) == pytest.approx(38, abs=4)


def test_coefficients_scale_part_by_part() -> None:
    doubled = PRIOR.times((2.0,) * 10)
    assert isinstance(doubled, Coefficients)
    assert doubled.parts == tuple(2 * part for part in PRIOR.parts)
    assert doubled.ridge == PRIOR.ridge


def test_prompt_tokens_cost_what_they_are_padded_to_and_pieces_end_there() -> None:
    sizes = (64, 256, 512)
    plain, padded = CostModel(PRIOR, learning=False), CostModel(PRIOR, learning=False, sizes=sizes)
    beside = Work(rows=16, context=16 * 640)
    for count, as_if in ((1, 64), (64, 64), (65, 256), (512, 512), (513, 513), (2000, 2000)):
        work, larger = replace(beside, tokens=count), replace(beside, tokens=as_if)
        assert padded.predict(work) == plain.predict(larger)
    assert padded.predict(beside) == plain.predict(beside)
    limit = plain.predict(replace(beside, tokens=400, pairs=pairs(0, 400)))
    assert padded.tokens_within(limit, beside, 0, 1000) == 256
    assert plain.tokens_within(limit, beside, 0, 1000) == 400
