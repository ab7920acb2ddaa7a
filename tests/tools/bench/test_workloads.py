"""The mathematics of the tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.tools.bench.workloads import Row, median_row
from saccade.tools.report import figure, median, percentile

SOME = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SOME, st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="0 to 1"):
        percentile([1.0], 99)


def test_a_row_reports_the_median_and_keeps_every_sample() -> None:
    row = median_row("text_bs1", "step", "ms", [3.0, 1.0, 2.0])
    assert (row.value, row.samples) == (2.0, (3.0, 1.0, 2.0))
    assert median([1.0, 2.0]) == 1.5


def test_a_figure_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        Row(workload="w", metric="m", unit="ms", value=float("nan"))


def test_figures_are_short() -> None:
    assert [figure(value) for value in (8250.4, 48.02, 4.321, 0.0)] == ["8,250", "48.0", "4.32", "0.00"]
