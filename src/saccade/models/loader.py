"""Builds a model and copies a checkpoint's tensors straight into it: no second copy of the weights exists."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from saccade.checkpoint import Checkpoint
from saccade.config import LoadFormat
from saccade.errors import CheckpointError
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.models.experts import Experts
from saccade.models.interface import LanguageModel
from saccade.models.layers import LayerNorm, ModelBuilder, OffsetRMSNorm, RMSNorm
from saccade.models.linear import (
    DUMMY_STD,
    LinearMethod,
    LinearScheme,
    TensorError,
    UnquantizedLinear,
    refuse_quantized,
)
from saccade.models.registry import Projection, WeightMap, find_family, find_quantization

log = logging.getLogger(__name__)

PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")
SHOWN = 8  # names listed in an error or warning
DUMMY_SEED = 0


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    progress: bool = False,
    mode: KernelMode = DEFAULT_MODE,
    online: LinearScheme | None = None,  # quantises the weights of a 16-bit checkpoint
) -> LanguageModel:
    """Build the model on the device, then fill it: from the files, or with noise (`dummy`)."""
    family = find_family(checkpoint.architecture)
    quantization = checkpoint.config.get("quantization_config") if load_format != "dummy" else None
    scheme = online or UnquantizedLinear
    if quantization is not None:
        if online is not None:
            raise CheckpointError("the checkpoint is quantised already; start without --quantization")
        scheme = _scheme(quantization, family.WEIGHTS, checkpoint.weight_files())
    builder = ModelBuilder(torch.device(device), dtype, mode, scheme)
    model = family.build(checkpoint.config, builder).eval()
    if load_format == "dummy":
        fill_randomly(model)
    else:
        allowed = PLAIN_DTYPES if quantization is None else None
        load_weights(model, family.WEIGHTS, checkpoint.weight_files(), progress, allowed)
    return model


def _scheme(quantization: object, weights: WeightMap, files: Sequence[Path]) -> LinearScheme:
    config: Mapping[str, Any] = quantization if isinstance(quantization, dict) else {}
    found = find_quantization(str(config.get("quant_method", "unnamed" if config else quantization)))
    layers: dict[str, set[str]] = {}  # by the checkpoint's name of a layer: the last names of its tensors
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                layer, _, last = name.rpartition(".")
                layers.setdefault(layer, set()).add(last)

    def projections(path: str) -> list[Projection]:
        spellings = weights.names(path)
        known = [next((name for name in names if name in layers), names[0]) for names in spellings]
        return [Projection(name, frozenset(layers.get(name, ()))) for name in known]

    return found.build_scheme(config, projections)


class WeightSlot(NamedTuple):
    """Where one tensor of a checkpoint goes."""

    names: tuple[str, ...]  # it has any of these
    load: Callable[[Tensor], None]  # raises a ValueError if the tensor does not fit


def find_slots(model: nn.Module, weights: WeightMap) -> list[WeightSlot]:
    slots = []
    for path, module in model.named_modules():
        if isinstance(module, LinearMethod):
            for partition, names in enumerate(weights.names(path)):
                for last in module.checkpoint_tensors(partition):
                    load = partial(module.load, last, partition)
                    slots.append(WeightSlot(tuple(f"{name}.{last}" for name in names), load))
            continue
        if isinstance(module, Experts):
            (names,) = weights.names(path)
            for last, place in module.checkpoint_tensors():
                slots.append(WeightSlot(tuple(f"{name}.{last}" for name in names), place))
            continue
        for last, parameter in module.named_parameters(recurse=False):
            (names,) = weights.names(path)
            slots.append(WeightSlot(tuple(f"{name}.{last}" for name in names), partial(_copy, parameter)))
    return slots


def _copy(parameter: Tensor, tensor: Tensor) -> None:
    refuse_quantized(tensor)
    if tensor.shape != parameter.shape:
        raise ValueError(f"is {list(tensor.shape)}, but config.json makes it {list(parameter.shape)}")
    parameter.copy_(tensor)


@torch.no_grad()
def load_weights(
    model: nn.Module,
    weights: WeightMap,
    files: Sequence[Path],
    progress: bool,
    allowed: Sequence[str] | None = PLAIN_DTYPES,  # of tensors; None: any
) -> None:
    """Copy every tensor of the files to its slot; every slot must be filled."""
    slots = find_slots(model, weights)
    by_name = {name: index for index, slot in enumerate(slots) for name in slot.names}
    filled: dict[int, str] = {}
    unexpected: list[str] = []
    with _progress_bar(progress) as bar:
        task = bar.add_task("loading weights", total=sum(file.stat().st_size for file in files))
        for file in files:
            for name, tensor in _tensors(file, allowed):
                index = by_name.get(name)
                if index is None:
                    if not name.endswith(weights.ignored):
                        unexpected.append(name)
                elif index in filled:
                    raise CheckpointError(
                        f"the checkpoint has {name} and {filled[index]} for the same weights"
                    )
                else:
                    _load(slots[index], name, tensor)
                    filled[index] = name
                bar.advance(task, tensor.nbytes)
    missing = [slot.names[0] for index, slot in enumerate(slots) if index not in filled]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_list(missing)}; complete the folder")
    if unexpected:
        log.warning("the checkpoint has tensors that the model does not use: %s", _list(unexpected))
    for module in model.modules():
        if isinstance(module, LinearMethod | OffsetRMSNorm):
            module.finish_loading()


def _load(slot: WeightSlot, name: str, tensor: Tensor) -> None:
    try:
        slot.load(tensor)
    except TensorError as error:
        raise CheckpointError(f"the tensor {name.rpartition('.')[0]}.{error.last} {error}") from error
    except ValueError as error:
        raise CheckpointError(f"the tensor {name} {error}") from error


def _tensors(file: Path, allowed: Sequence[str] | None) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors as views of the mapped file: read only when copied."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                dtype = opened.get_slice(name).get_dtype()
                if allowed is not None and dtype not in allowed:
                    raise CheckpointError(
                        f"the tensor {name} is {dtype}, and config.json has no 'quantization_config' to read "
                        f"it by; without one only {', '.join(allowed)} are supported"
                    )
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} is damaged or cut short; download it again ({error})") from error


def weight_bytes(model: nn.Module) -> int:
    """In memory; tied weights count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Noise of the right shapes, made on the device: norms 1, biases 0, weights normal."""
    generator: torch.Generator | None = None
    for module in model.modules():
        if isinstance(module, LinearMethod):
            generator = generator or torch.Generator(module.spec.device).manual_seed(DUMMY_SEED)
            module.fill_randomly(generator)
            continue
        for last, parameter in module.named_parameters(recurse=False):
            generator = generator or torch.Generator(parameter.device).manual_seed(DUMMY_SEED)
            if last == "bias":
                parameter.zero_()
            elif isinstance(module, RMSNorm | LayerNorm):
                parameter.fill_(1)
            else:
                parameter.normal_(0, DUMMY_STD, generator=generator)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _progress_bar(progress: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (progress and console.is_terminal),
    )
