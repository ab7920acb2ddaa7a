"""What the loop does while a step runs that does nothing but look."""

from types import SimpleNamespace
from typing import Any

import pytest

from saccade.request import Delta
from saccade.runtime.engine import OverlappedLoop, Turns

TOLD = [Delta(request_id="r")]


def launched(*, brief: bool) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(brief=brief, number=7), looks=None)


def turns(calls: list[str], *, pace: bool = True, fails: bool = False) -> Turns:
    def rehearse() -> None:
        calls.append("rehearsed")
        if fails:
            raise MemoryError

    scheduler: Any = SimpleNamespace(looking=SimpleNamespace(rehearse=rehearse))
    other: Any = object()
    return Turns(scheduler, other, other, pace=other if pace else None)


def test_only_looks_alone_on_a_device_of_its_own_are_prepared_for() -> None:
    calls: list[str] = []
    turns(calls).expect_looks(None)
    turns(calls).expect_looks(launched(brief=False))
    turns(calls, pace=False).expect_looks(launched(brief=True))
    assert calls == []
    turns(calls).expect_looks(launched(brief=True))
    assert calls == ["rehearsed"]


def test_a_rehearsal_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    turns([], fails=True).expect_looks(launched(brief=True))
    assert "step 7" in caplog.text


@pytest.mark.parametrize("told", [[], TOLD], ids=["nobody waits", "somebody does"])
def test_news_go_out_before_anything_is_rehearsed(told: list[Delta]) -> None:
    calls: list[str] = []
    look = launched(brief=True)

    class Steps:
        def plan(self) -> object:
            return object()

        def launch(self, plan: object) -> tuple[Any, list[Delta]]:
            return look, []

        def learn(self, behind: object) -> list[Delta]:
            return told

        def expect_looks(self, ahead: object) -> None:
            assert ahead is look
            calls.append("rehearsed")

    some: Any = Steps()
    assert OverlappedLoop(some).step() == told
    assert calls == ([] if told else ["rehearsed"])
