"""The overlapped loop while a step computes relevance."""

from types import SimpleNamespace
from typing import Any

from saccade.engine.core import OverlappedLoop
from saccade.request import Delta


class Script:
    """Stages that note what is done, and schedule the given plans."""

    def __init__(self, *plans: Any, requests_waiting: bool = False) -> None:
        self.did: list[str] = []
        self._plans = list(plans)
        self.requests_waiting = requests_waiting

    def schedule(self) -> Any:
        self.did.append("schedule")
        return self._plans.pop(0)

    def execute(self, plan: Any) -> tuple[Any, list[Delta]]:
        return plan, []

    def update_relevance(self, behind: object) -> list[Delta]:
        self.did.append("update_relevance")
        return []

    def update(self, behind: object) -> list[Delta]:
        self.did.append("update")
        return []


def step_with_relevance(*, brief: bool = False) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(early_exit=brief), has_relevance=True)


def after(first: Any, *plans: Any, requests_waiting: bool = False) -> list[str]:
    """What the loop does once `first` has been launched."""
    script = Script(first, *plans, requests_waiting=requests_waiting)
    stages: Any = script
    loop = OverlappedLoop(stages)
    loop.step()
    script.did.clear()
    loop.step()
    return script.did


def test_relevance_is_awaited_if_nothing_can_be_scheduled_without_it() -> None:
    some = step_with_relevance()
    assert after(some, None, some) == ["schedule", "update_relevance", "schedule", "update"], (
        "nothing could be planned without"
    )
    assert after(some, some) == ["schedule", "update"], "others go on meanwhile"


def test_relevance_is_updated_with_its_step_if_requests_wait() -> None:
    some = step_with_relevance()
    assert after(some, None, some, requests_waiting=True) == ["schedule", "update", "schedule"]
    assert after(step_with_relevance(brief=True), None, some) == ["schedule", "update", "schedule"], (
        "it has nothing else"
    )
