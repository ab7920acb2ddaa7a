"""What a figure was measured on: the machine, package versions, the source commit, the weights."""

import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from saccade import __version__
from saccade.checkpoint import Checkpoint
from saccade.config import EngineConfig
from saccade.engine.memory import resolve_device, resolve_dtype

PACKAGES = ("torch", "triton", "transformers", "numpy", "pillow", "tokenizers", "safetensors")

FINGERPRINT_BYTES = 16 << 20  # from each end of a weight file

Facts = dict[str, str | int | float | None]


@dataclass(frozen=True)
class RunInfo:
    """What a report says about the run itself."""

    model: str
    date: str
    command: str
    commit: str | None
    machine: Facts
    versions: dict[str, str]
    engine: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.model} ({self.dtype}) on {self.machine['device']}"

    @property
    def dtype(self) -> str:
        return str(self.engine["resolved_dtype"])


def run_info(engine: EngineConfig, checkpoint: Checkpoint, source: str | None) -> RunInfo:
    """`source` is the commit, taken at the start of the run."""
    device = resolve_device(engine)
    dtype = str(resolve_dtype(engine, checkpoint, device)).removeprefix("torch.")
    return RunInfo(
        model=checkpoint.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=source,
        machine=describe(str(device)),
        versions=versions(),
        engine={**asdict(engine), "resolved_device": str(device), "resolved_dtype": dtype},
    )


def device_name(device: str) -> str:
    """The accelerator's name, or the processor's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return _cpu_name()


def describe(device: str) -> Facts:
    facts: Facts = {
        "device": device_name(device),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        facts["device_memory_gib"] = round(properties.total_memory / (1 << 30), 1)
        facts["cuda"] = torch.version.cuda
    return facts


def versions() -> dict[str, str]:
    found = {"saccade": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The source's commit, with a + if files differ from it; None if this is not a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of size, beginning and end of each weight file. Reading all of a large one would take
    minutes."""
    digest = blake3()
    for path in checkpoint.weight_files():
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(FINGERPRINT_BYTES)
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(size.to_bytes(8, "little") + head + file.read())
    return digest.hexdigest(length=8)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
