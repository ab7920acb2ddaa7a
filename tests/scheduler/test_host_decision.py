"""A sequence waits for a decision of the host while the others go on."""

import pytest

from saccade.lod.types import RelevanceMaps
from saccade.request import Request
from saccade.scheduler.host_decision import Resolution
from saccade.step_plan import PromptLayout, Span
from tests.scheduler.simulated_device import Engine, answer_alone, question, small_limits


class SlowGrammar:
    """A decision that needs nothing from the device but takes time on the host, like a grammar compiler."""

    finishes_request = False

    def __init__(self, polls: int, error: str | None = None) -> None:
        self.polls = polls
        self._error = error

    def probe(self, request: Request, layout: PromptLayout) -> tuple[Span, ...]:
        return ()

    def resolve(
        self, request: Request, layout: PromptLayout, relevance: tuple[RelevanceMaps, ...]
    ) -> Resolution | None:
        assert relevance == ()
        if self.polls:
            self.polls -= 1
            return None
        if self._error:
            raise ValueError(self._error)
        return Resolution(request, layout)


class Grammars:
    """Attached to the requests whose id names one."""

    request_field = "id"

    def __init__(self, **grammars: SlowGrammar) -> None:
        self._grammars = grammars

    def attach(self, request: Request) -> SlowGrammar | None:
        return self._grammars.get(request.id)


def ask(name: str, n: int = 1) -> Request:
    return question(name, [5, 6, 7, 5, 6], max_tokens=12, stop_token_ids=(), n=n)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_others_go_on_while_a_sequence_waits_for_the_host(overlap: bool, prefix_caching: bool) -> None:
    grammars = Grammars(slow=SlowGrammar(6))
    engine = Engine(overlap=overlap, prefix_caching=prefix_caching, host_decisions=grammars)
    requests = [ask("plain"), ask("slow", n=2)]
    for request in requests:
        engine.add(request)
    engine.run(until=lambda: bool(engine.tokens("slow")))
    assert len(engine.tokens("plain")) > 6
    engine.run()
    for request in requests:
        for index in range(request.sampling.n):
            assert engine.tokens(request.id, index) == answer_alone(request, index, engine.limits)
    assert engine.pool.used == 0


def test_a_sequence_that_waits_for_the_host_can_be_preempted_and_cancelled() -> None:
    grammars = Grammars(slow=SlowGrammar(9), gone=SlowGrammar(99))
    engine = Engine(overlap=True, host_decisions=grammars, limits=small_limits(max_step_tokens=7))
    for request in (ask("plain"), ask("slow"), ask("gone")):
        engine.add(request)
    for _ in range(4):
        engine.step()
    (sequence,) = engine.scheduler._requests["slow"].sequences
    engine.scheduler._planner.preempt(sequence)
    engine.scheduler.check()
    engine.step()
    engine.cancel("gone")
    engine.run()
    assert engine.tokens("gone") == []
    assert engine.finish("gone") == "cancelled"
    assert engine.tokens("slow") == answer_alone(ask("slow"), 0, engine.limits)
    assert engine.pool.used == 0


def test_a_decision_that_fails_ends_its_request_alone() -> None:
    engine = Engine(host_decisions=Grammars(slow=SlowGrammar(2, "no such rule")))
    for request in (ask("plain"), ask("slow")):
        engine.add(request)
    engine.run()
    assert engine.finish("slow") == "error"
    assert "no such rule" in str(engine.deltas["slow"][-1].error)
    assert engine.tokens("plain") == answer_alone(ask("plain"), 0, engine.limits)
