"""Peak rates of a device, and lower bounds of the time of a step or a prompt at those rates.

A lower bound is bytes over bandwidth or operations over the matrix product rate, whichever is longer;
launches, activations and the host count as nothing. Known chips have the rates of engine/cost_prior.py;
others are measured in a second."""

import time
from dataclasses import dataclass, replace

import torch

from saccade.engine.cost_prior import H200, Chip, ModelSize

KNOWN = {"H200": H200}  # by a part of the device's name
_GEMM_SIDE = {"cuda": 8192, "cpu": 512}
_READ_BYTES = {"cuda": 4 << 30, "cpu": 128 << 20}
_ROUNDS = 10  # the fastest counts: others may have shared the machine


def chip_of(device: torch.device, dtype: torch.dtype) -> Chip:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, chip in KNOWN.items():
            if part in name and dtype.itemsize == 2:
                return chip
    matrix, reading = _matrix_rate(device, dtype), _read_rate(device)
    return Chip("measured here", reading, matrix, matrix, matrix, 0.0, link=reading)


def _timed(device: torch.device, left: torch.Tensor, right: torch.Tensor | None) -> float:
    """Seconds of the fastest of a few rounds of left @ right, or of reading left."""
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first warms up
        synchronize(device)
        began = time.perf_counter()
        _ = left.sum() if right is None else left @ right
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = _GEMM_SIDE[device.type]
    left = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _timed(device, left, left)


def _read_rate(device: torch.device) -> float:
    values = torch.ones(_READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return values.nbytes / _timed(device, values, None)


@dataclass(frozen=True)
class Floors:
    """Milliseconds at the peak rates of one chip."""

    network: ModelSize
    chip: Chip

    def decode(self, rows: int, context: int) -> float:
        """One token for each of `rows` sequences of `context` tokens; reading and computing overlap."""
        weights = 1e3 * self.network.parameters * self.network.value_bytes / self.chip.bandwidth
        return max(weights + self.reading(rows * context), self.products(rows))

    def products(self, tokens: int) -> float:
        """Matrix products of a step of so many tokens, with logits for all of them."""
        return self._longest(self.network.parameters, tokens)

    def reading(self, tokens: int) -> float:
        """Reading K and V of so many tokens once."""
        return 1e3 * tokens * self.network.kv_bytes / self.chip.bandwidth

    def prefill(self, tokens: int) -> float:
        """A prompt of so many tokens, with logits for the last one."""
        network = self.network
        head = network.vocab * network.hidden
        pairs = tokens * (tokens + 1) / 2
        attention = 4e3 * network.layers * network.heads * network.head_dim * pairs / self.chip.attention
        return self._longest(network.parameters - head, tokens) + self._longest(head, 1) + attention

    def encode(self, patches: int) -> float:
        """One view of so many patches through the vision tower."""
        network = self.network
        if not network.vision_depth:
            return 0.0
        pairs = 4e3 * network.vision_depth * network.vision_hidden * patches**2
        return self._longest(network.vision_parameters, patches) + pairs / self.chip.vision_attention

    def _longest(self, parameters: int, tokens: int) -> float:
        read = parameters * self.network.value_bytes / self.chip.bandwidth
        return 1e3 * max(read, 2 * parameters * tokens / self.chip.matrix)


def floors(network: ModelSize, device: torch.device, dtype: torch.dtype) -> Floors:
    return Floors(replace(network, value_bytes=dtype.itemsize), chip_of(device, dtype))
