"""Our greedy answers beside a peer's, token for token. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from saccade.tools.evaluation.ask import Asked
from saccade.tools.evaluation.score import Outcome


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    prompt: tuple[int, ...]  # one placeholder where the picture is
    visual_tokens: int
    token_ids: tuple[int, ...]  # the end token not among them
    text: str
    right: bool


class PeerEngine(Protocol):
    """What a peer's module offers as `Peer(checkpoint, device, dtype, max_tokens)`."""

    name: str

    def answer(self, asked: Asked) -> PeerAnswer: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """One question, answered by both."""

    ours: Outcome
    theirs: PeerAnswer
    same_prompt: bool  # text tokens and the number of visual ones

    @property
    def equal(self) -> bool:
        return self.ours.token_ids == self.theirs.token_ids

    @property
    def shared(self) -> int:
        """Tokens before the first difference."""
        both = zip(self.ours.token_ids, self.theirs.token_ids, strict=False)
        shorter = min(len(self.ours.token_ids), len(self.theirs.token_ids))
        return next((place for place, (a, b) in enumerate(both) if a != b), shorter)


@dataclass(frozen=True, slots=True)
class Agreement:
    peer: str
    questions: int
    equal: int  # answers equal token for token
    same_prompts: int
    tokens: int  # of the peer's answers
    shared_tokens: int  # of those, before a first difference
    peer_right: int


def agreement(peer: str, pairs: Sequence[Pair]) -> Agreement:
    return Agreement(
        peer=peer,
        questions=len(pairs),
        equal=sum(pair.equal for pair in pairs),
        same_prompts=sum(pair.same_prompt for pair in pairs),
        tokens=sum(len(pair.theirs.token_ids) for pair in pairs),
        shared_tokens=sum(pair.shared for pair in pairs),
        peer_right=sum(pair.theirs.right for pair in pairs),
    )
