"""A checkpoint's tensors, each copied straight into its place.

takes   a model with empty parameters, a family's `WeightMap`, safetensors files
gives   the same model, filled; or an error that names the tensor
never   reads anything but safetensors; holds a second copy of the weights
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.models.layers import LayerNorm, Linear, RMSNorm

log = logging.getLogger(__name__)

PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")
SHOWN = 8  # names listed in an error or warning
DUMMY_STD = 0.02
DUMMY_SEED = 0


@dataclass(frozen=True)
class WeightMap:
    """Where our modules' tensors are in a checkpoint, as data.

    `modules` maps one of our modules to the checkpoint's modules it is made of, in order: several where
    projections are fused. `*` stands for a layer's number, `{root}` for any of the spellings of that root.
    """

    modules: Mapping[str, tuple[str, ...]]
    roots: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()  # endings of names that may be there and are not needed

    def names(self, module: str) -> list[tuple[str, ...]]:
        """For each part of one of our modules, the names it may have in a checkpoint."""
        numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
        parts = self.modules.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module))
        if parts is None:
            raise ValueError(f"the weight map does not say where {module!r} is in a checkpoint")
        return [tuple(self._spellings(part, numbers)) for part in parts]

    def _spellings(self, part: str, numbers: Sequence[str]) -> Iterator[str]:
        for number in numbers:
            part = part.replace("*", number, 1)
        found = re.match(r"\{(\w+)\}", part)
        if found is None:
            yield part
            return
        for root in self.roots[found[1]]:
            yield root + part[found.end() :]


class Slot(NamedTuple):
    """A place for one tensor: a parameter, or its share of a fused one."""

    names: tuple[str, ...]  # any of these
    into: Tensor


def find_slots(model: nn.Module, weights: WeightMap) -> list[Slot]:
    slots = []
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            parts = weights.names(path)
            sizes = module.parts if isinstance(module, Linear) else (parameter.shape[0],)
            for names, into in zip(parts, parameter.split(sizes), strict=True):
                slots.append(Slot(tuple(f"{name}.{leaf}" for name in names), into))
    return slots


@torch.no_grad()
def fill(model: nn.Module, weights: WeightMap, files: Sequence[Path], progress: bool) -> None:
    """Copy every tensor of the files to where it belongs; all places must be filled."""
    slots = find_slots(model, weights)
    by_name = {name: index for index, slot in enumerate(slots) for name in slot.names}
    filled: dict[int, str] = {}
    unexpected: list[str] = []
    with _progress_bar(progress) as bar:
        task = bar.add_task("loading weights", total=sum(file.stat().st_size for file in files))
        for file in files:
            for name, tensor in _tensors(file):
                index = by_name.get(name)
                if index is None:
                    if not name.endswith(weights.ignored):
                        unexpected.append(name)
                elif index in filled:
                    raise CheckpointError(
                        f"the checkpoint has {name} and {filled[index]} for the same weights"
                    )
                else:
                    _copy(name, tensor, slots[index].into)
                    filled[index] = name
                bar.advance(task, tensor.nbytes)
    missing = [slot.names[0] for index, slot in enumerate(slots) if index not in filled]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_list(missing)}; complete the folder")
    if unexpected:
        log.warning("the checkpoint has tensors the model has no use for: %s", _list(unexpected))


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors as views of the mapped file: read only when copied."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                kind = opened.get_slice(name).get_dtype()
                if kind not in PLAIN_DTYPES:
                    raise CheckpointError(
                        f"the tensor {name} is {kind}; quantised checkpoints are not supported, "
                        f"only {', '.join(PLAIN_DTYPES)}"
                    )
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} is damaged or cut short; download it again ({error})") from error


def _copy(name: str, tensor: Tensor, into: Tensor) -> None:
    # A convolution that covers its whole input once is a projection of the flattened input.
    flat = tensor.flatten(1) if tensor.dim() > 2 and into.dim() == 2 else tensor
    if flat.shape != into.shape:
        raise CheckpointError(
            f"the tensor {name} is {list(tensor.shape)}, but config.json makes it {list(into.shape)}"
        )
    into.copy_(flat)


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Weights of the right shapes and no meaning, made where they live: norms 1, biases 0, the rest noise."""
    generators: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "bias":
                parameter.zero_()
            elif isinstance(module, RMSNorm | LayerNorm):
                parameter.fill_(1)
            else:
                device = parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(DUMMY_SEED)
                parameter.normal_(0, DUMMY_STD, generator=generators[device])


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
