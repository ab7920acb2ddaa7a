"""Top-k, top-p and min-p, each as the least logit it keeps."""

import numpy as np
import torch
from torch import Tensor

# Columns of the parameter table, [slots, 9] float64 (the 32-bit key halves are exact in it).
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, KEY_LOW, KEY_HIGH = range(9)
GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_CANDIDATES = 1024  # on the CPU, top-p tries so many tokens before it sorts all


def scale_and_mask(logits: Tensor, parameters: Tensor, kind: str, largest_k: int) -> Tensor:
    """[n, V] logits minus the largest, over the temperature; -inf where masked; in place."""
    line = parameters.float().unsqueeze(-1)  # [n, 9, 1]
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(line[:, TEMPERATURE])
    least = line[:, MIN_P].log()  # relative to the largest, which is 0
    if kind == "top_k":
        k = parameters[:, TOP_K].long()
        least = torch.maximum(least, top_k_least(scaled, k, line[:, TOP_P], largest_k))
    elif kind == "top_p":
        least = torch.maximum(least, top_p_least(scaled, line[:, TOP_P]))
    return scaled.masked_fill_(scaled < least, -torch.inf)


def top_k_least(logits: Tensor, k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """The k-th largest logit of each line (ties stay in), or the least that top-p keeps of those, if larger.

    logits [n, V], the largest 0; k [n], all at most largest_k; top_p [n, 1].
    """
    best = logits.topk(largest_k, dim=-1).values  # descending
    least = best.gather(1, k.unsqueeze(1) - 1)
    inside = best >= least
    # Tokens tied with the k-th beyond the largest_k found: they are kept too, so they share in the mass.
    ties = (logits >= least).sum(dim=-1, keepdim=True) - inside.sum(dim=-1, keepdim=True)
    weights = torch.where(inside, best.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True) + ties * least.exp()
    return torch.where(top_p < 1, _nucleus(best, weights / total, top_p).maximum(least), least)


def top_p_least(logits: Tensor, top_p: Tensor) -> Tensor:
    """The least logit of the smallest set of best tokens whose mass reaches top_p [n, 1] (ties stay in)."""
    total = logits.exp().sum(dim=-1, keepdim=True)
    if logits.device.type != "cpu":
        best = logits.sort(dim=-1, descending=True).values
        return _nucleus(best, best.exp() / total, top_p)
    best = logits.topk(min(_CANDIDATES, logits.shape[1]), dim=-1).values
    shares = best.exp() / total
    if bool((shares.sum(dim=-1, keepdim=True) >= top_p).all()):  # reading this back costs nothing here
        return _nucleus(best, shares, top_p)
    best = torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)  # sorts no indices: thrice as fast
    return _nucleus(best, best.exp() / total, top_p)


def _nucleus(best: Tensor, shares: Tensor, top_p: Tensor) -> Tensor:
    """Tokens [n, m], best first, are kept while the mass before them is below top_p; the first always is."""
    before = shares.cumsum(dim=-1) - shares
    kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return best.gather(1, kept - 1)
