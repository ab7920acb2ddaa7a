"""Random prompts and images, reproducible by seed and never repeated, so that no cache knows them."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError
from saccade.inputs.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COARSE = 16  # a smooth image is this many random colours along each side, enlarged
GRAIN = 12  # amplitude of its noise: the JPEG then has the size of a photograph


class RandomInputs:
    """Every call draws new ones."""

    def __init__(self, checkpoint: Checkpoint, tokens: Tokenizer, seed: int | Sequence[int]) -> None:
        self._checkpoint = checkpoint
        self._tokens = tokens
        self._rng = np.random.default_rng(seed)
        self._ids = plain_ids(checkpoint, tokens)
        self._grain: NDArray[np.int16] | None = None

    def text(self, length: int) -> list[int]:
        """`length` random plain token ids."""
        ids: list[int] = self._rng.choice(self._ids, length).tolist()
        return ids

    def about_image(self, length: int) -> list[int]:
        """An image placeholder with start and end token, then `length` random plain token ids."""
        checkpoint = self._checkpoint
        frame = (checkpoint.vision_start_id, checkpoint.image_token_id, checkpoint.vision_end_id)
        return [token for token in frame if token is not None] + self.text(length)

    def image(self, size: tuple[int, int]) -> Image.Image:
        """An image of random RGB values."""
        width, height = size
        return Image.frombytes("RGB", size, self._rng.bytes(width * height * 3))

    def words(self, length: int) -> str:
        """A text of about `length` tokens, words of random letters."""
        words: list[str] = []
        while len(self._tokens.encode_plain(" ".join(words))) < length:
            letters = self._rng.integers(0, len(LETTERS), 4)
            words.append("".join(LETTERS[letter] for letter in letters))
        return " ".join(words)

    def data_uri(self, size: tuple[int, int]) -> str:
        """A smooth, noisy image as a JPEG data URI of a photograph's size."""
        width, height = size
        coarse = self._rng.integers(0, 256, (COARSE, COARSE, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        if self._grain is None or self._grain.shape != smooth.shape:
            self._grain = self._rng.integers(-GRAIN, GRAIN + 1, smooth.shape, dtype=np.int16)
        shift = (int(self._rng.integers(height)), int(self._rng.integers(width)))
        pixels = (smooth + np.roll(self._grain, shift, (0, 1))).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def plain_ids(checkpoint: Checkpoint, tokens: Tokenizer) -> NDArray[np.int64]:
    """Every id of the vocabulary that is not a control token."""
    control = {
        *tokens.control.values(),
        *checkpoint.eos_ids,
        checkpoint.bos_id,
        checkpoint.image_token_id,
        checkpoint.video_token_id,
        checkpoint.vision_start_id,
        checkpoint.vision_end_id,
    }
    ids = np.arange(checkpoint.vocab_size, dtype=np.int64)
    plain = ids[~np.isin(ids, [token for token in control if token is not None])]
    if not plain.size:
        raise ConfigError(f"{checkpoint.name} has only control tokens; there is nothing to measure with")
    return plain
