"""The prompt of a request changes in the middle of its life: views are chosen, or guessed, or taken back.

takes   a request up to the end of its question, and the same request with zoomed views
gives   all its choices the prompt it has now, and what they hold for it
never   chooses; changes anything up to the end of the question

A guess is undone by cutting everything back to the end of the question: what is computed up to there depends
on nothing behind it, and stays. So does what views have in common that were guessed and chosen, up to the
first that is another. The blocks behind stay too, claimed for the most the prompt can become.
"""

from itertools import zip_longest

from saccade.encoder.prompt_layout import extend_layout
from saccade.request import Request
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.policy import Limits
from saccade.scheduler.sequence import Group, Guess, Regions, Sequence, pixels_of
from saccade.step_plan import Layout


def decide(group: Group, decided: Request, limits: Limits, holdings: Holdings) -> None:
    """Its views are chosen: blocks claimed for more than that are given back."""
    _adopt(group, decided, extend_layout(group.layout, group.request, decided), limits, holdings)
    for choice in group.choices:
        if choice.computed == len(choice.tokens):  # nothing was added: its end is computed again, to sample
            choice.computed -= 1
        if choice.row is not None:
            choice.renewed = True
            holdings.trim(choice)


def guess(sequence: Sequence, guessed: Request, regions: Regions, limits: Limits, holdings: Holdings) -> bool:
    """Go on with views before they are chosen, in a request about to enter its row; not, and False, if one of
    the views it comes to is not there. Nothing is given back: the views chosen may be more."""
    group = sequence.group
    layout = extend_layout(group.layout, group.request, guessed)
    ahead = [span for span in layout.spans if span.stop > sequence.computed]
    if not holdings.pinning.pin_ready(sequence, ahead):
        return False
    group.guess = Guess(group.request, group.layout, regions)
    _adopt(group, guessed, layout, limits, holdings)
    return True


def keep(group: Group, holdings: Holdings) -> None:
    """The guess was right: the request is as if its views had been chosen before."""
    if group.guess is not None:
        group.guess.open, group.guess.kept = False, True
    for choice in group.choices:
        choice.looking = False
        if choice.row is not None:
            holdings.trim(choice)


def take_back(group: Group, limits: Limits, holdings: Holdings) -> None:
    """The guess was wrong, or cannot be waited for: its views are to be chosen still. A token sampled behind
    it is dropped when it comes."""
    if group.guess is None:
        return
    request, layout = group.guess.request, group.guess.layout
    group.guess.open = False
    _adopt(group, request, layout, limits, holdings)
    end = len(layout.tokens)
    for choice in group.choices:
        choice.pending = 0
        choice.looking = False
        choice.computed = min(choice.computed, end)
        if choice.chain is not None:
            choice.chain.truncate(end)
        holdings.pinning.taken_back(choice, end)


def correct(group: Group, decided: Request, limits: Limits, holdings: Holdings) -> None:
    """The guess was wrong, and it is known what is right."""
    if group.guess is None:
        raise RuntimeError(f"request {group.request.id} has no guess to be corrected")
    guessed, end = group.layout, len(group.guess.layout.tokens)
    reached = [choice.computed for choice in group.choices]
    take_back(group, limits, holdings)
    decide(group, decided, limits, holdings)
    for choice, computed in zip(group.choices, reached, strict=True):
        stays = min(computed, end + _alike(guessed, group.layout, end), len(choice.tokens) - 1)
        choice.computed = max(choice.computed, stays)


def _alike(one: Layout, other: Layout, start: int) -> int:
    """How many tokens from `start` on are the same in both, with the same views in the same places."""
    count = min(len(one.tokens), len(other.tokens)) - start
    pairs = zip(one.tokens[start:], other.tokens[start:], strict=False)
    count = next((n for n, (token, its) in enumerate(pairs) if token != its), count)
    for views in zip_longest(one.spans, other.spans):
        if views[0] != views[1]:
            return min(count, *(view.start - start for view in views if view is not None))
    return count


def _adopt(group: Group, request: Request, layout: Layout, limits: Limits, holdings: Holdings) -> None:
    """From now on this is the request, and its prompt that of all its choices."""
    holdings.making.gone(group)
    group.request, group.layout = request, layout
    group.pixels = pixels_of(request, layout)
    holdings.making.came(group)
    for choice in group.choices:
        choice.tokens = list(layout.tokens)
        choice.limit = limits.end_of(request)
        choice.known = None  # of its beginning: it was asked for by other tokens
        choice.set_prompt()
        if choice.chain is not None:
            choice.chain.set_spans(layout.spans)
