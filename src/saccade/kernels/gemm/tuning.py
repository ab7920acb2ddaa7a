"""Tables of launch parameters of the products y = x W^T: the shipped one, and what this machine measured.

Shapes that no table names go by the model of the kernels (`tuning_model`). A table is never changed:
`extended` makes another one. Measured tunings are kept in the user's cache folder, in one file per GPU and
version of Triton.
"""

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from saccade.kernels.gemm.tuning_model import FORMATS, LIMITS, Gpu, Product, ProductTuning, model_tunings

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("tunings.json")
VERSION = 1  # of the files; another one is ignored

Entries = Mapping[Product, ProductTuning | None]  # None: the library's product is faster


class TuningTable:
    """Frozen; kernels get it with their `KernelMode`."""

    def __init__(self, entries: Entries | None = None, gpu: Gpu = Gpu()) -> None:
        self.entries: Entries = MappingProxyType(dict(entries or {}))
        self.gpu = gpu

    def __contains__(self, product: Product) -> bool:
        return product.key in self.entries

    def extended(self, entries: Entries) -> "TuningTable":
        return TuningTable({**self.entries, **entries}, self.gpu)

    def choose(self, product: Product) -> ProductTuning | None:
        """The table's choice, or the model's first."""
        key = product.key
        return self.entries[key] if key in self.entries else model_tunings(key, self.gpu)[0]


def entries_to_json(entries: Entries) -> str:
    lines = [json.dumps([list(key), None if t is None else list(t)]) for key, t in sorted(entries.items())]
    return f'{{"version": {VERSION}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def entries_from_json(text: str) -> dict[Product, ProductTuning | None]:
    """Raises a ValueError for what is not such a file."""
    try:
        read = json.loads(text)
        if read["version"] != VERSION:
            raise ValueError(f"version {read['version']}, not {VERSION}")
        return dict(_entry(*line) for line in read["entries"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no table of tunings: {error!r}") from None


def _entry(key: list[str | int | bool], value: list[int] | None) -> tuple[Product, ProductTuning | None]:
    name, rows, columns, depth, gated = key
    product = Product(str(name), int(rows), int(columns), int(depth), bool(gated))
    if name not in FORMATS or rows not in LIMITS or min(product.columns, product.depth) < 1:
        raise ValueError(f"no product: {key}")
    if value is None:
        return product, None
    tuning = ProductTuning(*map(int, value))
    if min(tuning[:-1]) < 1 or tuning.ahead < 0:
        raise ValueError(f"no tuning: {value}")
    return product, tuning


def shipped_entries() -> dict[Product, ProductTuning | None]:
    """Measured on an H200."""
    return entries_from_json(SHIPPED.read_text())


def cache_path(folder: Path, gpu_name: str) -> Path:
    """The file of what was measured on this kind of GPU with this Triton."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu_name} triton {triton}").strip("-").lower()
    return folder / f"{name}.json"


def read_cache(path: Path) -> dict[Product, ProductTuning | None]:
    try:
        return entries_from_json(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("the measured tunings in %s are ignored: %s; delete the file", path, error)
        return {}


def write_cache(path: Path, entries: Entries) -> None:
    """Adds to the file, atomically. A folder that cannot be written is reported, not fatal."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {**read_cache(path), **entries}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(entries_to_json(merged))
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("measured tunings are not kept: %s", error)
