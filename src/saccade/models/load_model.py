"""From a checkpoint to a model that is ready to run."""

import torch

from saccade.checkpoint import Checkpoint
from saccade.config import LoadFormat
from saccade.errors import CheckpointError
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.models.layers import LanguageModel, Place
from saccade.models.loader import fill, fill_randomly
from saccade.models.registry import find_family


def load(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    progress: bool = False,
    mode: KernelMode = DEFAULT_MODE,
) -> LanguageModel:
    """Build the model on the device, then fill it: from the files, or with noise (`dummy`)."""
    quantised = checkpoint.config.get("quantization_config")
    if quantised is not None and load_format != "dummy":
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"the checkpoint is quantised ({method}), which is not supported; use its unquantised version"
        )
    family = find_family(checkpoint.architecture)
    model = family.build(checkpoint.config, Place(torch.device(device), dtype, mode)).eval()
    if load_format == "dummy":
        fill_randomly(model)
    else:
        fill(model, family.WEIGHTS, checkpoint.weight_files(), progress)
    return model
