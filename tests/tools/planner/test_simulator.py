"""The link between device and host on the virtual clock: beside the steps, one copy after the other."""

import pytest

from saccade.tools.planner.command import PlanOptions, make_report
from saccade.tools.planner.simulator import SwapLink


def test_blocks_that_come_in_beside_a_step_delay_only_the_next_and_only_by_what_is_left() -> None:
    link = SwapLink(2.0)
    assert link.swap(10.0, 0, 3, wait=False) == 0.0  # there at 16
    assert link.swap(11.0, 0, 0, wait=False) == 5.0
    assert link.swap(17.0, 0, 0, wait=False) == 0.0


def test_a_step_that_reads_what_it_swaps_in_waits_for_it_behind_what_goes_out() -> None:
    link = SwapLink(2.0)
    assert link.swap(10.0, 1, 2, wait=True) == 6.0
    assert link.swap(16.0, 4, 0, wait=False) == 0.0  # nobody waits for what goes out
    assert link.swap(17.0, 0, 1, wait=True) == 9.0  # but for the link


@pytest.mark.parametrize("swap_bytes", [0, 4 << 30])
def test_a_plan_with_too_little_memory_swaps_if_it_may(swap_bytes: int) -> None:
    options = PlanOptions(
        layers=36,
        kv_heads=8,
        heads=32,
        hidden=4096,
        weight_bytes=15_136_000_000,
        kv_cache_bytes=5 * 10**8,
        traffic=("text:rate=12,prompt=200,output=400",),
        seconds=6,
        swap_bytes=swap_bytes,
    )
    played = make_report(options).as_json()["played"]
    assert played["preemptions"] > 0
    assert (played["swapped_blocks"] > 0) == bool(swap_bytes)
