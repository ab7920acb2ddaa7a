"""Which questions are asked: fixed by the numbers alone."""

import numpy as np
import pytest

from saccade.errors import ConfigError
from saccade.tools.evaluation import question_set
from saccade.tools.evaluation.question_set import chosen_tasks, chunks, sample_keys


def test_without_a_limit_all_are_asked_in_the_sets_order() -> None:
    assert sample_keys(("word", "code"), 3, None) == [
        (task, n) for task in ("word", "code") for n in range(3)
    ]


@pytest.mark.parametrize(("count", "limit"), [(200, 8), (200, 7), (200, 200), (5, 2), (1, 1)])
def test_a_limit_takes_distinct_questions_spread_evenly(count: int, limit: int) -> None:
    indices = [index for _, index in sample_keys(("word",), count, limit)]
    assert indices == [index for _, index in sample_keys(("word",), count, limit)]
    assert len(set(indices)) == limit
    assert indices[0] == 0
    assert indices[-1] < count
    gaps = np.diff([*indices, count])
    assert gaps.max() - gaps.min() <= 1


def test_tasks_keep_the_sets_order_and_unknown_ones_are_named() -> None:
    assert chosen_tasks(("shape", "colour")) == ("colour", "shape")
    assert chosen_tasks(()) == question_set.TASKS
    with pytest.raises(ConfigError, match=r"no task 'jugling'; known are colour, .*absent"):
        chosen_tasks(("colour", "jugling"))


@pytest.mark.parametrize("workers", [0, 1])
def test_chunks_are_the_same_with_and_without_workers(workers: int) -> None:
    wanted = sample_keys(("shape", "position"), 200, 2)
    drawn = list(chunks(wanted, 3, workers))
    assert [len(chunk) for chunk in drawn] == [3, 1]
    flat = [example for chunk in drawn for example in chunk]
    assert [(example.task, example.index) for example in flat] == wanted
    for example in flat:
        again = question_set.example(example.task, example.index)
        assert (example.question, example.answer) == (again.question, again.answer)
        assert np.array_equal(example.image, again.image)


def test_no_chunk_is_drawn_before_the_one_before_it_is_taken() -> None:
    """Images are large: drawing must not run ahead of the engine."""
    stream = chunks([("shape", 0), ("no such task", 0)], 1, 0)
    assert next(stream)[0].task == "shape"
    with pytest.raises(KeyError):
        next(stream)
