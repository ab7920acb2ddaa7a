"""Mixed questions for the tools that ask an engine in this process: text and images, all new, by a seed.

takes   an engine (`LLM`), a seed
gives   prompts as the library takes them; None of them longer than the engine holds
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.llm import LLM
from saccade.tools.bench.inputs import RandomInputs

IMAGE_SHARE = 0.3
SIDES = (64, 640)  # of images, log-uniform


@dataclass(frozen=True)
class Scope:
    """How long prompts are and how large images."""

    text: tuple[int, int] = (4, 200)  # tokens
    sides: tuple[int, int] = SIDES
    images: float = IMAGE_SHARE
    grain: int = 1  # sides are multiples of it; a coarse one makes few sizes, and tables of sizes full early


class Questions:
    def __init__(self, llm: LLM, seed: int, scope: Scope | None = None) -> None:
        checkpoint = llm.processor.checkpoint
        self._inputs = RandomInputs(checkpoint, llm.processor.tokenizer, seed)
        self._rng = np.random.default_rng([seed, 1])
        self._scope = scope or Scope()
        self._vision = checkpoint.image is not None and checkpoint.image_token_id is not None
        self._most = llm.engine.info.max_model_len

    def take(self, count: int) -> list[dict[str, Any]]:
        return [self._one() for _ in range(count)]

    def _one(self) -> dict[str, Any]:
        low, high = self._scope.text
        length = int(self._rng.integers(low, min(high, self._most // 2)))
        if not self._vision or self._rng.random() >= self._scope.images:
            return {"prompt_token_ids": self._inputs.text(length)}
        smallest, largest = np.log(self._scope.sides)
        grain = self._scope.grain
        sides = np.exp(self._rng.uniform(smallest, largest, 2))
        width, height = (max(round(side / grain), 1) * grain for side in sides)
        image = self._inputs.image((width, height))
        return {"prompt_token_ids": self._inputs.about_image(length), "images": [image]}
