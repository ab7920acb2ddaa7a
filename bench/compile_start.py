"""What a start compiles for an H200, kernel by kernel, on a machine without one.

    PYTHONPATH=src python -m bench.compile_start [qwen3-vl-8b] [--keys | --workers N]

Needs Triton, no GPU: the model is of the "meta" device, which has shapes and no data, and every launch is
turned into a compilation for compute capability 9.0. Set TRITON_CACHE_DIR to an empty folder, or what was
compiled before is found again. Seconds are of this machine, one kernel at a time: "python" is what holds the
interpreter's lock (source to IR), "rest" is LLVM and ptxas, which do not. `--keys` compiles nothing and only
counts, in a second or two. `launchers`: lists of argument types, each of which Triton 3.6 has a C compiler
make a launcher for. `--workers N` times the passes of a start with N processes that compile, or with threads
alone for 0: all of it, until the last kernel is asked for, and what this process computes in all its threads;
launchers aside.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from bench.compile_kernels import NoDevice, pretend
from bench.shapes import write
from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.kernels import jit
from saccade.kernels.compile_pool import CompilePool
from saccade.kernels.cuda_graph import PlainRecorder
from saccade.kernels.dispatch import DEFAULT_MODE
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Pages
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.registry import find_family
from saccade.sampling.sampler import Sampler
from saccade.worker import warmup as first
from saccade.worker.buckets import later_shapes
from saccade.worker.cuda_graphs import StepGraphCache
from saccade.worker.encoder_warmup import ODD_SIZES, SIZES
from saccade.worker.graph_step import GraphStep
from saccade.worker.input_batch import Slots

META = torch.device("meta")
ROWS, LONGEST, BLOCK = 256, 32768, 16
LAYERS = 4  # of the language model: the others launch the same; three have deep levels added


class Rooms(NamedTuple):
    checkpoint: Checkpoint
    model: LanguageModel
    step: GraphStep


def rooms(shapes: str) -> Rooms:
    with tempfile.TemporaryDirectory() as folder:
        write(shapes, Path(folder))
        checkpoint = open_checkpoint(folder)
    config = json.loads(json.dumps(checkpoint.config))
    config["text_config"]["num_hidden_layers"] = LAYERS
    model = find_family(checkpoint.architecture).build(config, ModelBuilder(META, torch.bfloat16)).eval()
    pages = Pages.allocate(single_group(model.kv_cache_groups, BLOCK), 2 * ROWS, META)
    slots = Slots(ROWS, -(-LONGEST // BLOCK), META)
    sampler = Sampler(ROWS, model.vocab_size, META)
    step = GraphStep(model, pages, slots, sampler, pdl=True, tapped_layers=(1, 2))
    return Rooms(checkpoint, model, step)


def passes(made: Rooms) -> dict[str, Callable[[], None]]:
    """A start in the order of `build_engine`, then what should find everything compiled."""
    image, model, step = made.checkpoint.image, made.model, made.step
    sampler = step._sampler
    graphs = StepGraphCache(step, PlainRecorder(), sampler, ROWS, LONGEST)

    def images() -> None:
        if image is not None and model.vision is not None:
            first._pixels(image, META, torch.bfloat16, (*SIZES, *ODD_SIZES), DEFAULT_MODE)
            first._tower(model.vision, META, torch.bfloat16)
            for side in (1, 13, 32):
                first._textures(META, (*SIZES, *ODD_SIZES), side, mode=DEFAULT_MODE)

    def later() -> None:
        for shape in later_shapes(ROWS, LONGEST, visual=True, early_exit=True):
            step.fill_with_padding(shape)
            step.run(shape)

    return {
        "kernels": lambda: first.compile_kernels(model, image, META, BLOCK, ROWS),
        "steps": lambda: graphs.warm_up(progress=False),
        "workspace again": lambda: _drop(first.run_prompt(model, META, 8192, BLOCK, model.mode)),
        "short prompt again": lambda: _drop(first.run_prompt(model, META, 70, BLOCK, model.mode)),
        "images again": images,
        "later steps": later,
    }


def _drop(value: object) -> None:
    """A pass gives nothing."""


@contextmanager
def keys_only(found: Callable[[str, str], None]) -> Iterator[None]:
    """Within: a launch that Triton would compile is told of, by its key, and nothing is compiled."""
    real = JITFunction._do_compile

    def note(function: Any, key: Any, *others: Any, **more: Any) -> None:
        found(function.fn.__name__, str(key))

    JITFunction._do_compile = note
    try:
        yield
    finally:
        JITFunction._do_compile = real


@torch.inference_mode()
def count(shapes: str) -> dict[str, tuple[int, int]]:
    """How many kernels each pass is the first to launch: to be compiled ahead, and left until it runs."""
    triton.runtime.driver.set_active(NoDevice())
    seen: dict[tuple[str, str], bool] = {}
    new: dict[str, tuple[int, int]] = {}
    with keys_only(lambda name, key: _note(seen, name, key)):
        for name, run in passes(rooms(shapes)).items():
            before = len(seen)
            run()
            ahead = list(seen.values())[before:]
            new[name] = ahead.count(True), ahead.count(False)
    return new


def _note(seen: dict[tuple[str, str], bool], name: str, key: str) -> None:
    seen.setdefault((name, key), jit.compiling())


class Compiled(NamedTuple):
    where: str
    name: str
    types: tuple[object, ...]
    python: float
    rest: float
    constants: str


class Asking(triton.AsyncCompileMode):  # type: ignore[misc]
    """Notes how long asking for kernels took, before all that is left is to wait for them."""

    seconds = 0.0

    def __enter__(self) -> Any:
        self.began = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        Asking.seconds += time.perf_counter() - self.began
        super().__exit__(*exception)


@torch.inference_mode()
def time_start(shapes: str, workers: int, threads: int) -> None:
    """How long each pass takes as a start has it: side by side."""
    pretend()
    jit.COMPILERS = threads
    triton.AsyncCompileMode = Asking
    heard: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: heard.append(cache_hit)
    made = rooms(shapes)
    with CompilePool(workers) as helpers:
        if workers and jit.cache_is_cold():
            helpers.start()
        for where, run in passes(made).items():
            heard[:], Asking.seconds = [], 0.0
            began, computed = time.perf_counter(), time.process_time()
            run()
            spent, computed = time.perf_counter() - began, time.process_time() - computed
            found = f"{heard.count(True)} of {len(heard)} kernels found on disk"
            print(
                f"{where:16} {spent:5.1f} s, asking {Asking.seconds:4.1f}, computing {computed:4.1f}; {found}"
            )


@torch.inference_mode()
def compile_all(shapes: str) -> list[Compiled]:
    pretend()
    jit.COMPILERS = 1
    kernels: list[Compiled] = []
    where = ""

    def heard(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        constants = " ".join(f"{src.fn.arg_names[at[0]]}={value}" for at, value in src.constants.items())
        rest = sum(spent for _, spent in times.lowering_stages) / 1e6
        types = tuple(src.signature.values())
        kernels.append(Compiled(where, src.name, types, times.ir_initialization / 1e6, rest, constants))

    triton.knobs.compilation.listener = heard
    for where, run in passes(rooms(shapes)).items():
        began = time.perf_counter()
        run()
        print(f"{where}: {time.perf_counter() - began:.1f} s")
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="?", default="qwen3-vl-8b")
    parser.add_argument("--keys", action="store_true", help="only count kernels")
    parser.add_argument("--workers", type=int, help="time a start with so many processes that compile")
    parser.add_argument("--threads", type=int, default=jit.COMPILERS, help="... where there are no processes")
    options = parser.parse_args()
    if options.keys:
        for name, (ahead, left) in count(options.shapes).items():
            print(f"{name:16} {ahead:3} compiled ahead, {left} left")
        return
    if options.workers is not None:
        time_start(options.shapes, options.workers, options.threads)
        return
    kernels = compile_all(options.shapes)
    for one in kernels:
        print(f"{one.where:16} {one.name:18} {one.python:5.2f} {one.rest:5.2f}  {one.constants}")
    python, rest = sum(one.python for one in kernels), sum(one.rest for one in kernels)
    launchers = len({one.types for one in kernels})
    print(f"{len(kernels)} kernels, {launchers} launchers; python {python:.1f} s, rest {rest:.1f} s")


if __name__ == "__main__":
    main()
