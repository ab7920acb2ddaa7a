"""Logit bias and penalties: per-slot token lists and token counts on the device, allocated at their first
use."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class TokenAddends:
    """For each slot a short list of (token id, addend), padded with (0, 0.0); widened on demand."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_slots, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(max_slots, 0, dtype=torch.float32, device=device)

    def set(self, slot: int, ids: Sequence[int], values: Sequence[float]) -> None:
        missing = len(ids) - self._ids.shape[1]
        if missing > 0:
            padding = (0, max(missing, self._ids.shape[1]))
            self._ids = F.pad(self._ids, padding)
            self._values = F.pad(self._values, padding)
        pad = self._ids.shape[1] - len(ids)
        write(self._ids[slot], torch.tensor([*ids, *(0,) * pad], dtype=torch.int64))
        write(self._values[slot], torch.tensor([*values, *(0.0,) * pad], dtype=torch.float32))

    def add_to(self, logits: Tensor, index: Tensor, slots: Tensor) -> None:
        """Add the lists of `slots` [n] to lines `index` [n] of logits [S, V], in place."""
        indices = self._ids[slots] + index.unsqueeze(1) * logits.shape[1]
        logits.view(-1).index_add_(0, indices.flatten(), self._values[slots].flatten())


class TokenHistory:
    """Token counts of the output and presence in the prompt, per slot; allocated with the first penalties."""

    def __init__(self, max_slots: int, vocab: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self._counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._prompt.nbytes

    def set(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._allocate(slot)
        prompt_ids, output_ids = self._known(prompt), self._known(output)
        self._counts[slot].zero_().index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        self._prompt[slot].zero_().index_fill_(0, prompt_ids, True)

    def penalise(self, logits: Tensor, slots: Tensor, penalties: Tensor) -> Tensor:
        """[n, V] logits after penalties [n, 3]: repetition, presence, frequency.

        Repetition scales the logits of tokens in prompt or output; the others lower those of output tokens.
        """
        repetition, presence, frequency = penalties.unsqueeze(-1).unbind(dim=1)  # [n, 1] each
        counts = self._counts[slots]
        produced = counts > 0
        scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
        seen = self._prompt[slots].logical_or_(produced)
        logits = torch.where(seen, scaled, logits)
        return logits.sub_(frequency * counts).sub_(presence * produced)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        indices = slots * self._counts.shape[1] + tokens
        self._counts.view(-1).index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))

    def _allocate(self, slot: int) -> None:
        """Allocate at least slots 0 .. slot; doubles, for low slots are used most."""
        have = self._counts.shape[0]
        if slot >= have:
            padding = (0, 0, 0, min(max(slot + 1, 2 * have, 8), self._max_slots) - have)
            self._counts = F.pad(self._counts, padding)
            self._prompt = F.pad(self._prompt, padding)

    def _known(self, ids: Sequence[int]) -> Tensor:
        """Ids with a logit; others (padding of the embedding, say) cannot be penalised."""
        array = np.asarray(ids, dtype=np.int64)
        known = array[(array >= 0) & (array < self._counts.shape[1])]
        return send(torch.from_numpy(known), self._counts.device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def write(target: Tensor, host: Tensor) -> None:
    """Copy to the device; the host does not wait."""
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
