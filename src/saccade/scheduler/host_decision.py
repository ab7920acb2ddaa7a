"""A decision that the host makes in the middle of a request, before its sequences may sample.

A request with a pending decision is computed up to the end of its known tokens and samples nothing there. The
decision is resolved with what that step returned; other sequences are scheduled meanwhile. A request without
a decision runs none of this.
"""

from dataclasses import dataclass
from typing import Protocol

from saccade.lod.types import RelevanceMaps
from saccade.request import FinishReason, Request, ZoomResult
from saccade.step_plan import PromptLayout, Span


@dataclass(frozen=True)
class Resolution:
    """What was decided. The request and its layout replace those of before: what is computed of the prompt
    must stay as it is, more may follow."""

    request: Request
    layout: PromptLayout
    finish: FinishReason | None = None  # ends the request here
    zoomed: ZoomResult | None = None  # level of detail's part of the request's first delta


class HostDecision(Protocol):
    @property
    def finishes_request(self) -> bool:
        """Whether the resolution ends the request. It is then made with the step's output and not before, so
        that the blocks of the step can be found in the prefix cache."""

    def probe(self, request: Request, layout: PromptLayout) -> tuple[Span, ...]:
        """The views whose relevance the step returns; none: the decision needs nothing from the device."""

    def resolve(
        self, request: Request, layout: PromptLayout, relevance: tuple[RelevanceMaps, ...]
    ) -> Resolution | None:
        """None: not yet; it is asked again before the next step. ValueError ends the request."""


class HostDecisions(Protocol):
    @property
    def request_field(self) -> str:
        """The field of a `Request` that asks for a decision; None there: the request needs none."""

    def attach(self, request: Request) -> HostDecision | None:
        """The decision a new request needs."""
