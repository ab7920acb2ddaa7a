"""`saccade quantize`: loads a 16-bit checkpoint, quantises it block by block and writes the result."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.memory import resolve_device, resolve_dtype
from saccade.errors import ConfigError
from saccade.models.families import FAMILIES
from saccade.models.interface import LanguageModel
from saccade.models.loader import load_model
from saccade.models.registry import WeightMap, find_family
from saccade.tools.quantize.calibration import Calibration, calibration_requests
from saccade.tools.quantize.linear import CalibratedLinear
from saccade.tools.quantize.options import QuantizeOptions
from saccade.tools.quantize.quantizer import CONVOLUTIONS, LayerError, QuantizedProjection, Quantizer
from saccade.tools.quantize.schemes import Scheme
from saccade.tools.quantize.writer import (
    ShardWriter,
    new_folder,
    quantization_config,
    read_tensors,
    write_config,
)
from saccade.tools.report import output_console, progress_bar

HEAD = "lm_head"  # transformers names it so even where it is tied to the embedding


@dataclass(frozen=True)
class QuantizeReport:
    layers: int
    nbytes: int  # of the written tensors
    before: int  # of the checkpoint's weight files
    errors: tuple[LayerError, ...]  # empty if nothing was calibrated
    seconds: float


def run(model: str, out: str, options: QuantizeOptions) -> int:
    """Returns the exit status."""
    report = quantize(model, out, options)
    console = output_console()
    console.print(
        f"{out}: {report.layers} linear layers, {report.nbytes / 1e6:,.1f} MB of {report.before / 1e6:,.1f},"
        f" in {report.seconds:.0f} s"
    )
    if report.errors:
        error = sum(one.error for one in report.errors) / len(report.errors)
        nearest = sum(one.nearest for one in report.errors) / len(report.errors)
        console.print(
            f"mean square error of the layers' outputs on the calibration prompts: {error:.2e} of the output,"
            f" {nearest:.2e} when rounded to nearest"
        )
    return 0


def quantize(model: str, out: str, options: QuantizeOptions) -> QuantizeReport:
    start = time.perf_counter()
    checkpoint = open_checkpoint(model)
    if checkpoint.config.get("quantization_config") is not None:
        raise ConfigError(f"{checkpoint.name} is quantised already; give its 16-bit version")
    family = find_family(checkpoint.architecture)
    if not FAMILIES[checkpoint.architecture].quantized:
        raise ConfigError(f"{checkpoint.architecture} has experts, which cannot be quantised yet")
    files = checkpoint.weight_files()
    folder = new_folder(out)
    engine = EngineConfig(model=model, device=options.device)
    device = resolve_device(engine)
    network = load_model(
        checkpoint, device, resolve_dtype(engine, checkpoint, device), online=CalibratedLinear
    )
    stored = next(tensor.dtype for _, tensor in read_tensors(files) if tensor.dim() == 2)
    quantizer = Quantizer(
        network,
        options,
        stored,
        lambda: Calibration(network, checkpoint, calibration_requests(options, checkpoint)),
    )
    names = TensorNames(network, family.WEIGHTS)
    writer = ShardWriter(folder)
    quantized: dict[Scheme, list[str]] = {}
    with progress_bar(options.progress, remaining=True) as bar:
        task = bar.add_task("quantising", total=len(quantizer.blocks))
        for projections in quantizer.run():
            for one in projections:
                name = names.projection(one)
                quantized.setdefault(one.scheme, []).append(name)
                for last, tensor in one.tensors.items():
                    writer.add(f"{name}.{last}", tensor)
            bar.advance(task)
    done = {name for some in quantized.values() for name in some}
    for name, tensor in names.others(files, done):
        writer.add(name, tensor)
    writer.finish()
    write_config(folder, checkpoint, quantization_config(quantized, names.ignored(done)))
    return QuantizeReport(
        layers=len(done),
        nbytes=writer.nbytes,
        before=sum(file.stat().st_size for file in files),
        errors=tuple(quantizer.errors),
        seconds=time.perf_counter() - start,
    )


class TensorNames:
    """Where the tensors of a model are in a checkpoint; written ones have the first of their spellings."""

    def __init__(self, model: LanguageModel, weights: WeightMap) -> None:
        self._written: dict[str, str] = {}  # by any spelling of a module's name: the first
        self._values: dict[str, Tensor] = {}  # by written name: norms and biases, which scales fold into
        self._linear: dict[tuple[str, int], str] = {}  # by path and partition: the module's written name
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            for partition, (first, *others) in enumerate(weights.names(path)):
                self._written |= dict.fromkeys((first, *others), first)
                rows = slice(None)
                if isinstance(module, CalibratedLinear):
                    rows = module.rows(partition)
                    self._linear[path, partition] = first
                for last, parameter in own.items():
                    if parameter.dim() == 1:
                        self._values[f"{first}.{last}"] = parameter[rows]

    def projection(self, one: QuantizedProjection) -> str:
        return self._linear[one.path, one.partition]

    def ignored(self, quantized: set[str]) -> list[str]:
        """Linear modules that are not quantised, as transformers names them."""
        names = [
            name
            for (path, _), name in self._linear.items()
            if name not in quantized and path not in CONVOLUTIONS
        ]
        return names if HEAD in self._linear.values() else [*names, HEAD]

    def others(self, files: Sequence[Path], quantized: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are not quantised: as they are, or as the folded scales have changed them."""
        for name, tensor in read_tensors(files):
            module, _, last = name.rpartition(".")
            module = self._written.get(module, module)
            if module in quantized and last == "weight":
                continue
            value = self._values.get(f"{module}.{last}")
            if value is not None and not torch.equal(value.cpu(), tensor.to(value.dtype)):
                tensor = value.to("cpu", tensor.dtype)
            yield f"{module}.{last}", tensor
