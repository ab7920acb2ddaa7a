"""Processes that compile: what they compile is found, what they cannot is done without them, none is left."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from saccade.kernels import compile_pool as workers
from saccade.kernels.compile_pool import CompilePool, current_pool, default_workers
from saccade.worker import warmup as start
from tests.kernels.buffers import needs_triton
from tests.kernels.programs import run

LISTENS = (sys.executable, "-c", "import sys; sys.stdin.read()")
DIES = (sys.executable, "-c", "pass")
RUBBISH = (sys.executable, "-c", "input(); print('yes')")

# Two kernels; prints for each whether this process found it on disk, then how many workers were started.
COMPILES = """
import sys
import torch, triton
from bench.compile_kernels import pretend
from saccade.kernels.norm_rope import elementwise
from saccade.kernels.jit import compile_only
from saccade.kernels.compile_pool import COMMAND, CompilePool

pretend()
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
with CompilePool(1, sys.argv[1:] or COMMAND) as workers:
    with compile_only():
        for kind in (torch.bfloat16, torch.float16):
            elementwise.silu_mul(torch.zeros(4, 64, dtype=kind, device="meta"))
    print(*found, workers.alive)
"""
# All kernels there are, with the keys Triton finds them by.
KEYS = """
import pkgutil, sys
from importlib import import_module
if sys.argv[1:]:
    from saccade.kernels.compile_worker import stub_torch
    stub_torch()
import saccade.kernels, triton
for module in pkgutil.walk_packages(saccade.kernels.__path__, "saccade.kernels."):
    if not module.name.endswith("compile_worker"):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, triton.JITFunction):
                print(f"{module.name}.{name}:{value.cache_key}")
print("__version__" in vars(sys.modules["torch"]))
"""
# Seconds until an interrupt gets out, with a worker that may be silent for a minute.
INTERRUPTED = """
import sys, time
import torch
from bench.compile_kernels import pretend
from saccade.kernels.norm_rope import elementwise
from saccade.kernels.jit import compile_only
from saccade.kernels.compile_pool import CompilePool

pretend()
began = time.monotonic()
try:
    with CompilePool(1, sys.argv[1:], seconds=60) as workers, compile_only():
        elementwise.silu_mul(torch.zeros(4, 64, dtype=torch.bfloat16, device="meta"))
        time.sleep(1)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(time.monotonic() - began)
"""
ABANDONS = """
import os
from saccade.kernels.compile_pool import CompilePool
workers = CompilePool(1)
workers.start()
print(workers._all[0].pid, flush=True)
os._exit(0)
"""


def soon(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@needs_triton
def test_what_a_worker_compiled_is_found_and_a_full_cache_starts_none(tmp_path: Path) -> None:
    """Red when a worker makes another key of a job than its asker, or starts though nothing is missing."""
    assert run(COMPILES, tmp_path) == ["True", "True", "1"]
    assert run(COMPILES, tmp_path) == ["True", "True", "0"]


@needs_triton
def test_jobs_of_a_broken_worker_are_compiled_without_it(tmp_path: Path) -> None:
    """Red when the failure of a worker costs a kernel."""
    assert run(COMPILES, tmp_path, *RUBBISH) == ["False", "False", "0"]


@needs_triton
def test_workers_that_fill_another_cache_are_not_asked_again(tmp_path: Path) -> None:
    """Red when everything would be compiled twice, once for nobody."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    elsewhere = ("env", f"TRITON_CACHE_DIR={theirs}", *workers.COMMAND)
    assert run(COMPILES, ours, *elsewhere) == ["False", "False", "1"]
    assert len(list(theirs.rglob("*.cubin"))) == 1


@needs_triton
def test_a_worker_reads_the_same_kernels_without_torch(tmp_path: Path) -> None:
    """Red when a kernel's file needs torch to load, or a kernel depends on something of it."""
    *with_torch, there = run(KEYS, tmp_path)
    *without, still_there = run(KEYS, tmp_path, "without")
    assert (there, still_there) == ("True", "False")
    assert len(with_torch) > 30
    assert without == with_torch


@needs_triton
def test_a_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    (pid,) = run(ABANDONS, tmp_path)
    assert soon(lambda: gone(int(pid)))


@pytest.mark.parametrize("command", [DIES, RUBBISH, LISTENS, ("/nowhere/python",)])
def test_a_useless_worker_is_asked_once(command: Sequence[str]) -> None:
    """Red when a dead or silent worker is waited for with every kernel."""
    with CompilePool(1, command, seconds=0.5) as some:
        assert not some.compile({"name": "kernel"})
        began = time.monotonic()
        assert not some.compile({"name": "kernel"})
        assert time.monotonic() - began < 0.4
        assert soon(lambda: some.alive == 0)


@pytest.mark.parametrize("path", [Path("/somewhere"), "/with\0zero"])
def test_an_odd_python_path_does_not_fail_the_start(monkeypatch: pytest.MonkeyPatch, path: object) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, path])
    with CompilePool(1, LISTENS, seconds=0.1) as some:
        some.start()
        assert some.alive == isinstance(path, Path)  # Python passes over what is no text
        assert not some.compile({"name": "kernel"})


@needs_triton
def test_an_interrupt_does_not_wait_for_workers(tmp_path: Path) -> None:
    """Red when a silent worker is waited for."""
    (seconds,) = run(INTERRUPTED, tmp_path, *LISTENS)
    assert float(seconds) < 20


def test_no_worker_is_left_when_the_owner_fails() -> None:
    some = CompilePool(2, LISTENS)
    pids: list[int] = []

    def own() -> None:
        with some:
            some.start()
            assert current_pool() is some
            pids.extend(worker.pid for worker in some._all)
            assert len(pids) == some.alive == 2
            raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        own()
    assert current_pool() is None
    assert all(gone(pid) for pid in pids)
    assert not some.compile({"name": "kernel"})  # nor are others started
    assert some.alive == 0


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (2, 0), (3, 0), (4, 3), (16, 15), (200, 16)])
def test_no_workers_on_few_cores(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert default_workers() == count


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert default_workers() == 0


@pytest.mark.parametrize(
    ("wanted", "empty", "alive"), [(True, True, 2), (True, False, 0), (False, True, None)]
)
def test_a_start_has_workers_ready_where_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, empty: bool, alive: int | None
) -> None:
    """Red when a start with a full cache starts processes, or one without kernels does."""
    monkeypatch.setattr(start, "TRITON", True)
    monkeypatch.setattr(start, "INTERPRETED", False)
    monkeypatch.setattr(start, "hash_triton", lambda: None)
    monkeypatch.setattr(start, "default_workers", lambda: 2)
    monkeypatch.setattr(start, "cache_is_cold", lambda: empty)
    monkeypatch.setattr(start, "CompilePool", lambda count: CompilePool(count, LISTENS))
    with start.compilers(wanted=wanted):
        some = current_pool()
        assert (None if some is None else some.alive) == alive
    assert current_pool() is None
    assert some is None or some.alive == 0
