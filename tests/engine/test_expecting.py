"""What the loop does while a step runs whose looks are waited for."""

from types import SimpleNamespace
from typing import Any

from saccade.engine.core import OverlappedLoop
from saccade.request import Delta


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


def step_with_looks(*, brief: bool = False) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(early_exit=brief), looks=object())


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
    assert after(some, None, some) == ["plan", "hear", "plan", "learn"], "nothing could be planned without"
    assert after(some, some) == ["plan", "learn"], "others go on meanwhile"


def test_looks_are_learnt_with_their_step_where_others_wait_for_that() -> None:
    some = step_with_looks()
    assert after(some, None, some, others_wait=True) == ["plan", "learn", "plan"]
    assert after(step_with_looks(brief=True), None, some) == ["plan", "learn", "plan"], "it has nothing else"
