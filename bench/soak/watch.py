"""Resources held by the server's processes, read from /proc (Linux only)."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """One process at one moment."""

    rss: int  # bytes resident
    anonymous: int  # of those, no file's: heaps, arenas, tensors
    descriptors: int
    threads: int
    children: int


@dataclass(frozen=True)
class Sample:
    seconds: float  # since the watch began
    front: Held
    engine: Held


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def engine_of(front: int) -> int:
    found = [pid for pid in children(front) if b"saccade.engine.process" in command(pid)]
    if not found:
        raise RuntimeError(f"process {front} has no engine")
    return found[0]


def held(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    sizes = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) << 10
    status = (folder / "status").read_text()
    threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
    descriptors = len(list((folder / "fd").iterdir()))
    return Held(sizes["Rss"], sizes["Anonymous"], descriptors, int(threads), len(children(pid)))


def running(pid: int) -> bool:
    """A process that has ended and waits for its parent counts as gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


@dataclass
class Watch:
    front: int
    engine: int
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)

    def sample(self) -> Sample:
        now = time.monotonic() - self.began
        self.samples.append(Sample(now, held(self.front), held(self.engine)))
        return self.samples[-1]


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics by its name and labels as Prometheus writes them."""
    text = httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).text
    return dict(_samples(text))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(one.labels.items()))
            yield one.name + (f"{{{labels}}}" if labels else ""), one.value
