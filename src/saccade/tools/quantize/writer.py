"""Writes a compressed-tensors checkpoint: shards, index, config.json and the files that go with them."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError
from saccade.tools.quantize.schemes import Scheme

SHARD_BYTES = 4 << 30
COPIED = (".json", ".jinja", ".txt", ".model")
INDEX = "model.safetensors.index.json"


def new_folder(out: str) -> Path:
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class ShardWriter:
    """Collects tensors and writes them in files of about 4 GiB."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self.nbytes += tensor.nbytes
        if sum(one.nbytes for one in self._pending.values()) >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            path = self._folder / f"model-{len(self._shards) + 1:05}.part"
            save_file(self._pending, path, metadata={"format": "pt"})
            self._shards.append((path, list(self._pending)))
            self._pending = {}

    def finish(self) -> None:
        """Give the files their names, and write the index if there are several."""
        self._flush()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            name = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            path.rename(self._folder / name)
            places |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(places.items()))}
        _write_json(self._folder / INDEX, index)


def read_tensors(files: Sequence[Path]) -> Iterable[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)


def quantization_config(quantized: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    """`quantized`: the names of a scheme's modules; `ignored`: the names of the linear modules left as they
    are."""
    formats = {scheme.format for scheme in quantized}
    groups = {}
    for number, (scheme, names) in enumerate(quantized.items()):
        targets = ["Linear"] if len(quantized) == 1 else _patterns(names)
        groups[f"group_{number}"] = scheme.config(targets)
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _patterns(names: Sequence[str]) -> list[str]:
    """Regular expressions for module names, one for all layers of a stack."""
    made = (re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names)
    return list(dict.fromkeys(f"re:{pattern}$" for pattern in made))


def write_config(folder: Path, checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> None:
    """config.json, and copies of the other files that the checkpoint needs."""
    _write_json(folder / "config.json", {**checkpoint.config, "quantization_config": quantization})
    relevance = checkpoint.config.get("saccade", {}).get("relevance", {}).get("file")
    for file in sorted(checkpoint.path.iterdir()):
        written = file.name in ("config.json", INDEX)
        if file.is_file() and not written and (file.suffix in COPIED or file.name == relevance):
            shutil.copyfile(file, folder / file.name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
