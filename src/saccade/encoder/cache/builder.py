"""The feature store of an engine, from its options: tiers, their budgets, whose features the files are.

takes   the options, the budget, the loaded model
gives   a `FeatureStore` of tensors
never   lets features of other weights or another dtype be taken for this model's
"""

import os
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from saccade.config import GIB, EngineConfig
from saccade.encoder.cache.disk import Disk
from saccade.encoder.cache.feature_files import Folder
from saccade.encoder.cache.store import FeatureStore
from saccade.encoder.cache.transfer import mover_for
from saccade.errors import ConfigError
from saccade.models.layers import LanguageModel

FORMAT = 1  # of the files, and of what the tower computes: another number forgets all files


def build_store(
    config: EngineConfig, feature_bytes: int, model: LanguageModel, device: torch.device
) -> FeatureStore[Tensor]:
    cache = config.vision_cache
    if model.vision is None:
        return FeatureStore(0)
    _refuse_too_much(cache.host)
    mover = mover_for(device)
    disk = None
    if cache.disk and cache.dir is not None:
        identity = fingerprint(model.vision, device)
        folder = Folder(Path(cache.dir).expanduser(), identity, cache.disk, cache.ttl)
        disk = Disk(folder, mover.slab, mover.blank)
    return FeatureStore(feature_bytes, host=cache.host, disk=disk, mover=mover, ttl=cache.ttl)


def _refuse_too_much(host: int) -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if host > there:
        raise ConfigError(
            f"vision cache: host is {host / GIB:.1f} GiB, but the machine has {there / GIB:.1f} GiB"
        )


@torch.inference_mode()
def fingerprint(tower: torch.nn.Module, device: torch.device) -> str:
    """Names the weights of a vision tower as they are loaded, their dtype and what computes with them."""
    hasher = blake3(f"{FORMAT} {device.type} {type(tower).__name__}".encode())
    for name, tensor in sorted(tower.state_dict().items()):
        hasher.update(f" {name} {tensor.dtype} {list(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)
