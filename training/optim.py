"""Muon for the matrices of the blocks, batched by shape; AdamW for everything else.

Muon's step is the momentum's nearest orthogonal matrix (five Newton-Schulz steps in bf16), scaled by 0.2
sqrt(max(rows, columns)) so that one learning rate suits both optimisers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor) -> Tensor:
    """g [n, r, c] -> each matrix with its singular values near one."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


class Muon:
    def __init__(
        self, parameters: list[tuple[nn.Parameter, int]], momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        """parameters: each with the number of square parts its rows hold (3 for a fused q, k, v)."""
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for p, parts in parameters:
            self.groups[p.shape[0] // parts, p.shape[1]].append((p, parts))
        self.buffers = {
            k: torch.zeros(sum(n for _, n in v), *k, device=v[0][0].device) for k, v in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (r, c), members in self.groups.items():
            grads = torch.cat([p.grad.view(n, r, c) for p, n in members if p.grad is not None])
            buffer = self.buffers[r, c]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum)).float() * (0.2 * max(r, c) ** 0.5)
            weights = [p.view(n, r, c) for p, n in members]
            torch._foreach_mul_(weights, 1 - rate * self.decay)
            torch._foreach_add_(weights, list(update.split([n for _, n in members])), alpha=-rate)

    def state(self) -> dict[str, Tensor]:
        return {f"{r}x{c}": b for (r, c), b in self.buffers.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for (r, c), buffer in self.buffers.items():
            buffer.copy_(state[f"{r}x{c}"])


class Optimiser:
    """Both optimisers behind one step."""

    def __init__(self, model: nn.Module, heads: nn.Module, rate: float, adam_rate: float) -> None:
        self.rate, self.adam_rate = rate, adam_rate
        matrices: list[tuple[nn.Parameter, int]] = []
        rest: list[nn.Parameter] = list(heads.parameters())
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                matrices.append((p, 3 if name.endswith("qkv.weight") else 1))
            else:
                rest.append(p)
        self.muon = Muon(matrices)
        self.rest = rest
        self.adam = torch.optim.AdamW(
            rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda
        )

    def step(self, share: float) -> None:
        """One step at `share` of the peak rates; gradients are dropped."""
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * share
        self.adam.step()
        self.muon.step(self.rate * share)
        self.adam.zero_grad(set_to_none=True)
        for members in self.muon.groups.values():
            for p, _ in members:
                p.grad = None

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": self.muon.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.muon.load(state["muon"])
