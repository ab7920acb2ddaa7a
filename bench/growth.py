"""Does memory grow? Some thousand mixed requests on an engine in this process, with memory samples.

    python -m bench.growth [MODEL] [--requests 2000] [--before 0] [options of saccade serve's engine]

Host memory is the anonymous resident memory after free pages were returned; on CUDA also what tensors take
(`allocated`) and what torch keeps (`reserved`). Bounded caches are filled first: shapes are captured, images
cached on the device, and `--before` requests run (3,000 on an H200 meet all shapes often enough). The first
fifth of the measured requests is warm-up. It fails if the rest grew by more than --allowed, or if anything is
still held."""

import ctypes
import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.lod_asking import prepare
from bench.questions import Questions, Scope
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, size_in_bytes, with_options
from saccade.config import EngineConfig, VisionCache
from saccade.encoder import upload
from saccade.llm import LLM
from saccade.sampling_params import SamplingParams

MIB = 1 << 20
GRAIN = 96  # pixels; few sizes of images
CHUNK = 50  # requests between two samples
WARMUP = 0.2  # share of the requests
FEATURE_BYTES = 8 * MIB
HOST_KV_BYTES, DEVICE_KV_BYTES = 64 * MIB, 6144 * MIB  # of 8B: 43,000 tokens, all that 50 requests want
LARGE = 1024  # pixels along the sides of images that fill what keeps them


@dataclass(frozen=True)
class MemorySample:
    requests: int
    host: int  # bytes
    allocated: int
    reserved: int


def small_caches(config: EngineConfig) -> EngineConfig:
    """Small caches, full early, so that later growth is a leak. Sizes given by the user are kept."""
    if config.vision_cache == VisionCache():
        config = replace(config, vision_cache=VisionCache(gpu=FEATURE_BYTES))
    if config.kv_cache_bytes is None and config.num_blocks is None:
        # A GPU's pool is resident from the start, but not what the prefix cache knows of its blocks.
        size = DEVICE_KV_BYTES if torch.cuda.is_available() else HOST_KV_BYTES
        config = replace(config, kv_cache_bytes=size)
    return config


def sample_memory(requests: int) -> MemorySample:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    status = Path("/proc/self/status").read_text()
    host = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
    if not torch.cuda.is_available():
        return MemorySample(requests, host, 0, 0)
    torch.cuda.synchronize()
    return MemorySample(requests, host, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def fill(llm: LLM, seed: int) -> None:
    """Fills what grows to a bound and has no option to make it small."""
    prepare(llm)
    if not torch.cuda.is_available() or llm.processor.checkpoint.image is None:
        return
    large = Questions(llm, seed, Scope(sides=(LARGE, LARGE), images=1.0))
    llm.generate(
        large.take(upload.UPLOADED_BYTES // (3 * LARGE**2) + 1), SamplingParams(max_tokens=1), progress=False
    )


def measure(llm: LLM, requests: int, seed: int, scope: Scope) -> list[MemorySample]:
    questions = Questions(llm, seed, scope)
    samples = []
    for done in range(0, requests, CHUNK):
        count = min(CHUNK, requests - done)
        params = SamplingParams(max_tokens=4 + done // CHUNK % 13, temperature=0.7, seed=done)
        llm.generate(questions.take(count), params, progress=False)
        llm.engine.check()
        samples.append(sample_memory(done + count))
    return samples


def grown(samples: list[MemorySample]) -> dict[str, int]:
    """Bytes from the end of the warm-up to the end, medians of a few samples against single peaks."""
    first = max(int(len(samples) * WARMUP), 1)

    def middle(part: list[MemorySample], name: str) -> int:
        values = sorted(getattr(one, name) for one in part)
        return int(values[len(values) // 2])

    names = ("host", "allocated", "reserved")
    return {name: middle(samples[-3:], name) - middle(samples[first - 1 : first + 2], name) for name in names}


def faults(samples: list[MemorySample], llm: LLM, allowed: int) -> list[str]:
    found = [
        f"{name} memory grew by {value / MIB:.1f} MiB"
        for name, value in grown(samples).items()
        if value > allowed
    ]
    stats = llm.engine.stats()
    if stats.blocks_used or stats.running or stats.waiting:
        found.append(f"something is still held: {stats}")
    return found


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--requests", type=int, default=2000)
@option("--before", type=int, default=0, metavar="COUNT", help="requests before those that are measured")
@option("--allowed", type=size_in_bytes, default="24MiB", metavar="SIZE", help="growth that is tolerated")
@option("--image-share", type=float, default=0.3)
@option("--questions-seed", type=int, default=0)
@with_options(ENGINE_OPTIONS)
def main(
    model: str,
    requests: int,
    before: int,
    allowed: int,
    image_share: float,
    questions_seed: int,
    **given: Any,
) -> None:
    config = small_caches(engine_config(model, given))
    llm = LLM(model, progress=False, **config.options())
    scope = Scope(images=image_share, grain=GRAIN)
    fill(llm, questions_seed + 1)
    measure(llm, before, questions_seed + 2, scope)
    samples = measure(llm, requests, questions_seed, scope)
    print(f"{model} on {llm.engine.info.device}, {llm.engine.info.dtype}; {requests} requests")
    print(f"{'requests':>9} {'host MiB':>9} {'allocated':>10} {'reserved':>9}")
    for one in samples[:: max(1, len(samples) // 10)] + samples[-1:]:
        sizes = (one.host, one.allocated, one.reserved)
        print(f"{one.requests:9} " + " ".join(f"{size / MIB:9.1f}" for size in sizes))
    print(
        "grew after the warm-up, MiB: " + ", ".join(f"{k} {v / MIB:.1f}" for k, v in grown(samples).items())
    )
    wrong = faults(samples, llm, allowed)
    llm.close()
    for fault in wrong:
        print(f"FAULT: {fault}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
