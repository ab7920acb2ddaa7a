"""System prompts as the tokens that every conversation with them begins with. No torch."""

from collections.abc import Sequence
from itertools import takewhile

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError
from saccade.inputs.chat_template import ChatTemplate
from saccade.inputs.tokenizer import Tokenizer


def pinned_tokens(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    """The common prefix of two conversations with the same system prompt."""
    if not texts:
        return []
    if checkpoint.chat_template is None:
        raise ConfigError("the model has no chat template, so no system prompts; leave out --pin-prefix")
    tokens = Tokenizer.load(checkpoint)
    template = ChatTemplate(checkpoint.chat_template, tokens, checkpoint.special_tokens)
    found = []
    for text in texts:
        one, other = (
            template.encode([{"role": "system", "content": text}, {"role": "user", "content": word}])
            for word in ("a", "b")
        )
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        found.append([token for token, _ in shared])
    return found
