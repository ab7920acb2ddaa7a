"""What device rows carry from step to step for the sampler: short lists of addends, and token counts.

takes   token ids as the host knows them, sampled tokens as the device has them
gives   edits of logits
owns    tensors by device row, which grow when a row first needs them
never   synchronises with the device
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class TokenAddends:
    """For each row a short list of (token id, addend), padded with (0, 0.0); widened on demand."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_rows, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(max_rows, 0, dtype=torch.float32, device=device)

    def set(self, row: int, ids: Sequence[int], values: Sequence[float]) -> None:
        missing = len(ids) - self._ids.shape[1]
        if missing > 0:
            padding = (0, max(missing, self._ids.shape[1]))
            self._ids = F.pad(self._ids, padding)
            self._values = F.pad(self._values, padding)
        pad = self._ids.shape[1] - len(ids)
        write(self._ids[row], torch.tensor([*ids, *(0,) * pad], dtype=torch.int64))
        write(self._values[row], torch.tensor([*values, *(0.0,) * pad], dtype=torch.float32))

    def add_to(self, logits: Tensor, index: Tensor, rows: Tensor) -> None:
        """Add the lists of device rows `rows` [n] to lines `index` [n] of logits [S, V], in place."""
        places = self._ids[rows] + index.unsqueeze(1) * logits.shape[1]
        logits.view(-1).index_add_(0, places.flatten(), self._values[rows].flatten())


class TokenHistory:
    """Token counts of the output and presence in the prompt, by row; held once some row has penalties."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._prompt.nbytes

    def set(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._reach(row)
        prompt_ids, output_ids = self._known(prompt), self._known(output)
        self._counts[row].zero_().index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        self._prompt[row].zero_().index_fill_(0, prompt_ids, True)

    def penalise(self, logits: Tensor, rows: Tensor, penalties: Tensor) -> Tensor:
        """[n, V] logits after penalties [n, 3]: repetition, presence, frequency.

        Repetition scales the logits of what prompt or output hold; the others lower what output holds.
        """
        repetition, presence, frequency = penalties.unsqueeze(-1).unbind(dim=1)  # [n, 1] each
        counts = self._counts[rows]
        produced = counts > 0
        scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
        seen = self._prompt[rows].logical_or_(produced)
        logits = torch.where(seen, scaled, logits)
        return logits.sub_(frequency * counts).sub_(presence * produced)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        places = rows * self._counts.shape[1] + tokens
        self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _reach(self, row: int) -> None:
        """Hold at least rows 0 .. row; doubles, as the low rows are the busy ones."""
        have = self._counts.shape[0]
        if row >= have:
            padding = (0, 0, 0, min(max(row + 1, 2 * have, 8), self._max_rows) - have)
            self._counts = F.pad(self._counts, padding)
            self._prompt = F.pad(self._prompt, padding)

    def _known(self, ids: Sequence[int]) -> Tensor:
        """Ids the head can produce; others (padding of the embedding, say) have no logit to penalise."""
        array = np.asarray(ids, dtype=np.int64)
        known = array[(array >= 0) & (array < self._counts.shape[1])]
        return send(torch.from_numpy(known), self._counts.device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def write(target: Tensor, host: Tensor) -> None:
    """Copy into a row on the device; the host does not wait."""
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
