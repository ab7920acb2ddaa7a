"""How steps run on the device: which kernels, CUDA graphs or not. Resolved once from the options."""

from typing import NamedTuple

import torch

from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.kernels.dispatch import KernelMode, use_triton
from saccade.kernels.gemm.tuning import TuningTable
from saccade.kernels.jit import INTERPRETED, TRITON

PDL_CAPABILITY = (9, 0)  # compute capability from which on there is programmatic dependent launch


class ExecutionMode(NamedTuple):
    mode: KernelMode = KernelMode()
    graphs: bool = False
    tower_graphs: bool = False  # of the vision tower, which is captured with any kernels
    pdl: bool = False  # programmatic dependent launch, in step graphs only: elsewhere it gains nothing

    def with_tunings(self, tunings: TuningTable) -> "ExecutionMode":
        return self._replace(mode=self.mode._replace(tunings=tunings))


def resolve_execution_mode(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> ExecutionMode:
    if config.kernels == "triton" and not (TRITON and (device.type == "cuda" or INTERPRETED)):
        raise ConfigError(
            f"kernels is triton, but the device is {device.type}"
            f"{'' if TRITON else ' and Triton is not installed'}; use --kernels auto or torch"
        )
    if config.deterministic and device.type == "cuda" and (config.kernels != "triton" or dtype.itemsize != 2):
        raise ConfigError(
            "deterministic needs kernels whose sums are in one order: on cuda use --kernels triton and "
            f"16 bits, not kernels {config.kernels} in {str(dtype).removeprefix('torch.')}"
        )
    mode = KernelMode(config.kernels, deterministic=config.deterministic)
    graphs = config.graphs == "on"
    if device.type == "cuda" and config.graphs != "off":
        graphs = _capturable(mode, device, dtype)
        if config.graphs == "on" and not graphs:
            raise ConfigError(
                f"graphs is on, but attention in {str(dtype).removeprefix('torch.')} with kernels "
                f"{config.kernels} runs on torch, which cannot be captured; use --kernels triton and 16 bits"
            )
    tower_graphs = config.graphs == "on" or (device.type == "cuda" and config.graphs == "auto")
    return ExecutionMode(mode, graphs, tower_graphs, _use_pdl(config, device, graphs))


def _capturable(mode: KernelMode, device: torch.device, dtype: torch.dtype) -> bool:
    """The reference implementations of these read sizes on the host, or cannot skip padding."""
    probe = torch.empty(1, dtype=dtype, device=device)
    return all(
        use_triton(name, probe, mode) for name in ("decode_attention", "prefill_attention", "qk_norm_rope")
    )


def _use_pdl(config: EngineConfig, device: torch.device, graphs: bool) -> bool:
    if config.early_launch == "off":
        return False
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY
    if config.early_launch == "on" and not (able and graphs):
        raise ConfigError(
            "early_launch is on, which needs captured steps (--graphs) on a GPU of compute capability "
            f"{PDL_CAPABILITY[0]}.{PDL_CAPABILITY[1]} or newer; leave --early-launch at auto"
        )
    return able and graphs
