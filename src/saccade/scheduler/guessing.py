"""Whether a request goes on behind its question at once, with the views chosen before about its pictures.

takes   a request about to enter a step, whose views are to be chosen after a look
gives   the same request with views guessed, so that one row computes all of its prompt and looks on the way
never   changes an answer: a guess that the look does not confirm is taken back, and costs time alone

A look that waits for nothing else takes a pass over the question, and its views another one. A right guess
spares the first; a wrong one has computed for nothing what is behind the first view that is another. How
often guesses are right is learnt (recall.py), whether they are made or not.
"""

from dataclasses import replace
from typing import Any

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.prompt_layout import insert_zoomed_views
from saccade.request import Request
from saccade.scheduler import lod_extend as lengthening
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.policy import Allowance, Limits
from saccade.scheduler.queues import Places
from saccade.scheduler.sequence import Group, Regions, Sequence
from saccade.scheduler.stats import Totals
from saccade.scheduler.step_builder import Step

SURE = 0.9  # luck from which on a guess is made beside others


class Guessing:
    def __init__(
        self,
        limits: Limits,
        places: Places,
        holdings: Holdings,
        store: EncoderCache[Any],
        totals: Totals,
    ) -> None:
        self._limits = limits
        self._places = places
        self._holdings = holdings
        self._store = store
        self._totals = totals
        self._recall = holdings.recall

    def guess(self, step: Step, sequence: Sequence, allowance: Allowance) -> None:
        """Lengthen a sequence that is about to enter the step, if all of it fits in there and it pays."""
        group = sequence.group
        regions = self._regions(group)
        if regions is None:
            return
        guessed = _with(group.request, regions)
        question = len(group.layout.tokens) - sequence.computed
        more = guessed.length - len(group.layout.tokens)
        if (
            guessed.length <= group.request.max_length
            and self._ready(guessed)
            and _fits(step, sequence.computed, question + more, allowance)
            and self._pays(step, sequence.computed, question, more)
            and lengthening.guess(sequence, guessed, regions, self._limits, self._holdings)
        ):
            self._totals.guesses += 1

    def _regions(self, group: Group) -> Regions | None:
        """What to guess, where guessing makes sense: once, for one choice, of pictures nobody has deleted."""
        zooming = group.request.zooming
        if zooming is None or zooming.only_look or group.guess is not None:
            return None
        if group.request.sampling.n > 1 or group.deleted:
            return None
        return self._recall.likeliest(group.request)

    def _ready(self, guessed: Request) -> bool:
        return all(self._store.is_ready(item.view.key) for item in guessed.media if item.origin is not None)

    def _pays(self, step: Step, start: int, question: int, more: int) -> bool:
        """What a right guess spares against what a wrong one costs, each as often as it happens. A look that
        has a step to itself takes all of its time; one beside others what it adds. Others, in the step or in
        line, wait for what turns out wrong, and meet steps of sizes that seldom come."""
        asked, whole = replace(step.work), replace(step.work)
        asked.add_row(start, question)
        whole.add_row(start, question + more)
        look = step.cost.predict(asked)
        lost = step.cost.predict(whole) - look
        spared = look - step.milliseconds if step.planned else look * self._limits.brief.share
        alone = not step.planned and sum(map(len, self._places.waiting)) == 1  # it is still in line itself
        luck = self._recall.luck
        return (alone or luck > SURE) and luck * spared > (1 - luck) * lost


def _with(request: Request, regions: Regions) -> Request:
    slots = request.zooming.placeholders if request.zooming is not None else ()
    return insert_zoomed_views(request, dict(zip(slots, regions, strict=True)))


def _fits(step: Step, start: int, tokens: int, allowance: Allowance) -> bool:
    """Whether the step has place and time for all of it: half a guess would not yield a token."""
    if tokens > min(step.tokens_left, allowance.tokens):
        return False
    return step.affords(start, tokens, allowance.until, 0) == tokens
