"""Feature tensors between device and host memory, and the encoder cache of an engine built on them.

On CUDA, copies run on a stream of their own with pinned host memory. A copy to the host starts behind the
work already given to the compute stream; a copy to the device starts ahead of the step that needs it, and the
compute stream waits for it where the features are first read. Both allocators know of the copy stream, so
memory that a copy still reads is neither freed nor overwritten. On a CPU a copy is a plain copy.

tests/encoder/cache/test_gpu_transfer.py compares the bytes of round trips on CUDA under concurrent stream
work.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from saccade.config import GIB, EngineConfig
from saccade.encoder.cache.disk import DiskTier
from saccade.encoder.cache.feature_files import FeatureBytes, FeatureFolder
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.cache.tiers import FeatureTransfer, PendingUpload
from saccade.errors import ConfigError
from saccade.host.allocator import copy_to_own_mapping, empty_in_own_mapping
from saccade.models.interface import LanguageModel

FORMAT = 1  # of the files and of what the tower computes; a new number invalidates all files
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class HostFeatures:
    """Features in host memory, complete once the event has happened."""

    tensor: Tensor
    ready: torch.cuda.Event | None = None


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: NDArray[np.uint8] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat.data


class CpuTransfer(FeatureTransfer[Tensor]):
    def to_host(self, features: Tensor) -> HostFeatures:
        return HostFeatures(copy_to_own_mapping(features))

    def to_device(self, host: HostFeatures) -> Tensor | PendingUpload[Tensor]:
        return copy_to_own_mapping(host.tensor)

    def to_bytes(self, host: HostFeatures) -> FeatureBytes:
        if host.ready is not None:
            host.ready.synchronize()
        return FeatureBytes(_NAMES[host.tensor.dtype], tuple(host.tensor.shape), _bytes_of(host.tensor))

    def allocate_host(self, dtype: str, shape: tuple[int, ...]) -> tuple[HostFeatures, memoryview]:
        tensor = empty_in_own_mapping(shape, _DTYPES[dtype])
        return HostFeatures(tensor), _bytes_of(tensor)


class CudaTransfer(CpuTransfer):
    """The thread that launches steps calls it; `to_bytes` and `allocate_host` may be called from any
    thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, features: Tensor) -> HostFeatures:
        # The features may still be computed.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
            host.copy_(features, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        features.record_stream(self._stream)  # its memory is reused only after the copy
        return HostFeatures(host, ready)

    def to_device(self, host: HostFeatures) -> PendingUpload[Tensor]:
        with torch.cuda.stream(self._stream):
            # The same stream orders this behind a copy of these features to the host that is still running.
            features = torch.empty(host.tensor.shape, dtype=host.tensor.dtype, device=self._device)
            features.copy_(host.tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)

        def wait() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            features.record_stream(current)
            return features

        return PendingUpload(wait)

    def host_bytes(self, nbytes: int) -> int:
        """The allocator of pinned memory hands out powers of two."""
        return 1 << (nbytes - 1).bit_length() if nbytes else 0

    def allocate_host(self, dtype: str, shape: tuple[int, ...]) -> tuple[HostFeatures, memoryview]:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], pin_memory=True)
        return HostFeatures(tensor), _bytes_of(tensor)


def build_encoder_cache(
    config: EngineConfig, feature_bytes: int, model: LanguageModel, device: torch.device
) -> EncoderCache[Tensor]:
    cache = config.vision_cache
    if model.vision is None:
        return EncoderCache(0)
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if cache.host > present:
        raise ConfigError(
            f"vision cache: host is {cache.host / GIB:.1f} GiB, but the machine has {present / GIB:.1f} GiB"
        )
    transfer = CudaTransfer(device) if device.type == "cuda" else CpuTransfer()
    disk = None
    if cache.disk and cache.dir is not None:
        identity = tower_fingerprint(model.vision, device)
        folder = FeatureFolder(Path(cache.dir).expanduser(), identity, cache.disk, cache.ttl)
        disk = DiskTier(folder, transfer.to_bytes, transfer.allocate_host)
    return EncoderCache(feature_bytes, host=cache.host, disk=disk, transfer=transfer, ttl=cache.ttl)


@torch.inference_mode()
def tower_fingerprint(tower: torch.nn.Module, device: torch.device) -> str:
    """Names the tower's weights as loaded, their dtype and the device type, so that no other model's features
    are read from the folder."""
    hasher = blake3(f"{FORMAT} {device.type} {type(tower).__name__}".encode())
    for name, tensor in sorted(tower.state_dict().items()):
        hasher.update(f" {name} {tensor.dtype} {list(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)
