"""What the tools ask of another engine that runs the same checkpoint: prompts in, greedy tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

from PIL import Image

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError

# Imported by name, only when a peer is asked for: transformers is not a dependency of the package.
PEERS = {"transformers": "saccade.tools.transformers_peer"}


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]  # one placeholder for the image
    image: Image.Image | None = None


class PeerOutput(NamedTuple):
    token_ids: list[int]  # up to the first end token, if the peer stops there
    visual_tokens: int


class PeerEngine(Protocol):
    name: str

    def chat_tokens(self, text: str) -> list[int]:
        """The prompt of a user's message with one image before `text`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[PeerOutput]:
        """Greedy; several prompts run as one batch, padded on the left."""
        ...


def load_peer(
    name: str, checkpoint: Checkpoint, device: str, dtype: str, *, stop_at_end: bool, remedy: str
) -> PeerEngine:
    try:
        module = import_module(PEERS[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the peer {name} is not installed ({error.name} is missing); install it or {remedy}"
        ) from error
    peer: PeerEngine = module.TransformersPeer(checkpoint, device, dtype, stop_at_end=stop_at_end)
    return peer


def until_end(tokens: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end token."""
    stop = next((index for index, token in enumerate(tokens) if token in end_ids), len(tokens))
    return list(tokens[:stop])


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
