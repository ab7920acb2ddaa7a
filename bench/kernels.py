"""Are the kernels right on this GPU, and how fast: one script for a machine that has torch and Triton alone.

    PYTHONPATH=src python3 -m bench.kernels                      everything, under 3 minutes on an H200
    PYTHONPATH=src python3 -m bench.kernels --parts decode,products --rows 1,8,32,64
    PYTHONPATH=src python3 -m bench.kernels --parts many --choose --write    128 and 256 rows alone
    PYTHONPATH=src python3 -m bench.kernels --parts sample --inside          and by kernel
    PYTHONPATH=src python3 -m bench.kernels --check              no times; what compute-sanitizer should run
    PYTHONPATH=src python3 -m bench.kernels --choose --write     everything; the winners become the defaults

First the kernels are compiled by `--workers` processes at once (Triton keeps them on disk), then checked
against their references with poisoned outputs; a part that fails its check is not timed. Times are of CUDA
graph replays that rotate over inputs larger than the L2 cache, the median of several. "of ceiling" is the
time the chip's own limit allows (4.69 TB/s read, 4.29 TB/s copied, 561 TFLOP/s of causal attention, all
measured on an H200) over the time taken; the last column is against the first line of its group.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch

from bench.choose import Result, report
from bench.compile_kernels import pretend
from bench.kernel_cases import PRODUCTS, Case, cases
from bench.kernel_checks import CHECKS, Share, poisoned, samples
from bench.many_rows import many_cases

PARTS = tuple(CHECKS)
BUDGET_S = 0.02  # of device time for each timing
ROUNDS = 5  # over the inputs, where kernels are told apart


def every_case(parts: set[str], rows: tuple[int, ...]) -> list[Case]:
    return [*cases(parts, rows), *many_cases(parts)]


def compile_share(turn: str, parts: list[str], rows: tuple[int, ...], steps: set[str], seed: int) -> None:
    """What worker i of n does: launch on CPU tensors with a driver that only compiles."""
    number, workers = map(int, turn.split("/"))
    pretend()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    if "time" in steps:
        jobs = [(case, kernel) for case in every_case(set(parts), rows) for kernel in case.kernels.values()]
        for case, mine in groupby(jobs[number::workers], key=lambda job: job[0]):
            inputs = case.make(cpu, 0)
            for _, kernel in mine:
                kernel(inputs)
    if "check" in steps:
        share = Share(number, workers)
        for run in (run for part in parts for run in CHECKS[part]):
            if run is not samples:  # few kernels, and its reference sorts: slow here
                list(run(cpu, random.Random(seed), share))


def warm(workers: int, arguments: list[str]) -> None:
    began = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "bench.kernels", *arguments]
    running = [
        subprocess.Popen([*command, "--compile-share", f"{i}/{workers}"], stderr=subprocess.PIPE, text=True)
        for i in range(workers)
    ]
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            print(f"a compiling worker failed; its kernels are compiled when first used: {errors[-300:]}")
    if workers:
        print(f"compiled by {workers} processes in {time.perf_counter() - began:.0f} s")


def check(parts: Iterable[str], device: torch.device, seed: int) -> set[str]:
    """Print what fails, and how near the rest came; gives the parts that failed."""
    failed = set()
    for part in parts:
        worst, count = 0.0, 0
        for run in CHECKS[part]:
            torch.manual_seed(seed)
            for result in run(device, random.Random(seed), poisoned):
                count += 1
                if result.passed:
                    worst = max(worst, result.error / max(result.limit, 1e-9))
                else:
                    also = {"decode": {"layer", "prefill"}, "many": set()}
                    failed |= {part} | also.get(part, {"layer"})
                    print(f"WRONG  {result.name}: error {result.error:.2e}, limit {result.limit:.0e}")
        print(f"check {part}: {count} comparisons, worst at {worst:.0%} of its limit", flush=True)
    return failed


def seconds(call: Callable[[Any], Any], inputs: list[Any]) -> float:
    """Of one call: the median replay of a graph of all inputs in turn."""
    call(inputs[0])  # compiles, allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 8 // len(inputs))
    with torch.cuda.graph(graph):
        for item in inputs * rounds:
            call(item)
    calls = len(inputs) * rounds
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < BUDGET_S and len(taken) < 30):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken) / calls


def inside(call: Callable[[Any], Any], inputs: list[Any]) -> str:
    """Microseconds of one call by kernel, in the order they start; what is between them is left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for item in inputs * ROUNDS:
            call(item)
        torch.cuda.synchronize()
    spans: dict[str, float] = {}
    for event in profile.events():
        name = event.name.strip("_").removesuffix("_kernel")
        spans[name] = spans.get(name, 0.0) + event.device_time_total
    return ", ".join(f"{name} {spent / len(inputs) / ROUNDS:.1f}" for name, spent in spans.items() if spent)


def show_inside(case: Case, times: dict[str, float], inputs: list[Any]) -> None:
    """Of the quickest variant of each kind: kinds are what names have before their comma."""
    kinds = groupby(sorted(times, key=lambda name: name.split(",")[0]), key=lambda name: name.split(",")[0])
    for name in (min(names, key=lambda name: times[name]) for _, names in kinds):
        print(f"{case.part:9} {case.name:26}   {name:22} {inside(case.kernels[name], inputs)}", flush=True)


def measure(case: Case, device: torch.device, *, by_kernel: bool = False) -> Result:
    inputs = [case.make(device, i) for i in range(case.copies)]
    times: dict[str, float] = {}
    for name, call in (case.others | case.kernels).items():
        try:
            times[name] = seconds(call, inputs)
        except Exception as error:  # one variant that does not fit the chip must not end the session
            print(f"    {case.part} {case.name} [{name}]: {type(error).__name__} {str(error)[:120]}")
    best = min((name for name in case.kernels if name in times), key=lambda name: times[name], default=None)
    shown = [name for name in case.others if name in times]
    for name in [*shown, *sorted((n for n in case.kernels if n in times), key=lambda n: times[n])]:
        mark = "*" if name == best else " "
        base = times[shown[0]] / times[name] if shown else float("nan")
        print(
            f"{case.part:9} {case.name:26} {mark} {name:22} {times[name] * 1e6:9.1f} us  "
            f"{case.ceiling / times[name]:6.1%} of ceiling  {base:5.2f}x"
        )
    found = {name: times[name] for name in case.kernels if name in times}
    if by_kernel:
        show_inside(case, found, inputs)
    print(flush=True)
    return Result(
        case.part,
        case.name,
        found,
        {name: times[name] for name in case.others if name in times},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", help="rows of the skinny products [1,8,32; to choose: 1,16,32,64]")
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument("--time", action="store_true", help="no checks")
    parser.add_argument("--choose", action="store_true", help="print the lines the winners' tables need")
    parser.add_argument("--write", action="store_true", help="with --choose: change those tables")
    parser.add_argument("--inside", action="store_true", help="also the time of each kernel of a variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, default=12, help="compiling processes; 0: compile when first used"
    )
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if (options.write and not options.choose) or (options.choose and (options.check or options.time)):
        parser.error("--choose checks and times everything it is asked for; --write goes with it")
    listed = options.rows or ("1,16,32,64" if options.choose else "1,8,32")
    rows = tuple(int(count) for count in listed.split(","))
    steps = {"check", "time"} if options.check == options.time else {"check"} if options.check else {"time"}
    if options.compile_share:
        compile_share(options.compile_share, parts, rows, steps, options.seed)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device; without one, `python -m bench.compile_kernels` compiles")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {options.seed}")
    warm(options.workers, sys.argv[1:])
    failed = check(parts, device, options.seed) if "check" in steps else set()
    if "time" in steps:
        results = []
        with torch.inference_mode():
            for case in every_case(set(parts) - failed, rows):
                results.append(measure(case, device, by_kernel=options.inside))
                torch.cuda.empty_cache()
        if options.choose:
            chip = torch.cuda.get_device_name().removeprefix("NVIDIA ")
            report(results, failed, PRODUCTS, chip, write=options.write)
    if failed:
        raise SystemExit(f"wrong: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
