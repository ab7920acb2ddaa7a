"""What the loop does while a step runs whose looks are waited for."""

from types import SimpleNamespace
from typing import Any

import pytest

from saccade.engine.core import OverlappedLoop, Turns
from saccade.request import Delta

TOLD = [Delta(request_id="r")]


def launched(*, awaited: bool) -> Any:
    plan = SimpleNamespace(brief=awaited, guessed=False, number=7)
    return SimpleNamespace(plan=plan, looks=None, awaited=awaited)


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
    turns(calls).expect_looks(launched(awaited=False))
    turns(calls, pace=False).expect_looks(launched(awaited=True))
    assert calls == []
    turns(calls).expect_looks(launched(awaited=True))
    assert calls == ["rehearsed"]


def test_a_rehearsal_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    turns([], fails=True).expect_looks(launched(awaited=True))
    assert "step 7" in caplog.text


@pytest.mark.parametrize("told", [[], TOLD], ids=["nobody waits", "somebody does"])
def test_news_go_out_before_anything_is_rehearsed(told: list[Delta]) -> None:
    calls: list[str] = []
    look = launched(awaited=True)

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


class Script:
    """Turns that note what is done, and plan what they are told to."""

    def __init__(self, *plans: Any, others_wait: bool = False) -> None:
        self.did: list[str] = []
        self._plans = list(plans)
        self.others_wait = others_wait

    def plan(self) -> Any:
        self.did.append("plan")
        return self._plans.pop(0)

    def launch(self, plan: Any) -> tuple[Any, list[Delta]]:
        return plan, []

    def hear(self, behind: object) -> list[Delta]:
        self.did.append("hear")
        return []

    def learn(self, behind: object) -> list[Delta]:
        self.did.append("learn")
        return []

    def expect_looks(self, ahead: object) -> None:
        pass


def step_with_looks(*, guessed: bool = False, brief: bool = False, awaited: bool = True) -> Any:
    plan = SimpleNamespace(guessed=guessed, brief=brief)
    return SimpleNamespace(plan=plan, looks=object(), awaited=awaited)


def after(first: Any, *plans: Any, others_wait: bool = False) -> list[str]:
    """What the loop does once `first` has been launched."""
    script = Script(first, *plans, others_wait=others_wait)
    turns: Any = script
    loop = OverlappedLoop(turns)
    loop.step()
    script.did.clear()
    loop.step()
    return script.did


def test_looks_are_heard_first_where_the_next_step_hangs_on_them() -> None:
    some = step_with_looks()
    assert after(step_with_looks(guessed=True), some) == ["hear", "plan", "learn"]
    assert after(some, None, some) == ["plan", "hear", "plan", "learn"], "nothing could be planned without"
    assert after(some, some) == ["plan", "learn"], "others go on meanwhile"
    beside = step_with_looks(guessed=True, awaited=False)
    assert after(beside, some) == ["plan", "learn"], "streams do not wait for the guesses of others"


def test_looks_are_learnt_with_their_step_where_others_wait_for_that() -> None:
    some = step_with_looks()
    assert after(some, None, some, others_wait=True) == ["plan", "learn", "plan"]
    assert after(step_with_looks(brief=True), None, some) == ["plan", "learn", "plan"], "it has nothing else"
