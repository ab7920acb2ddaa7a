"""Runs a profile: every section warmed up, timed without the profiler, then traced once, all in one trace."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from saccade.config import EngineConfig
from saccade.engine.memory import DTYPES
from saccade.engine.model_size import read_network
from saccade.llm import LLM
from saccade.tools.bench.ceilings import floors
from saccade.tools.environment import device_name
from saccade.tools.profiler.options import ProfileOptions
from saccade.tools.profiler.report import Profile, Timed, show, write_json
from saccade.tools.profiler.sections import Ran, Section, Workbench, watched
from saccade.tools.profiler.trace import RANGE, read
from saccade.tools.report import median

WARM = 2  # runs of each section before it is timed: kernels are compiled, steps captured


def run(engine: EngineConfig, options: ProfileOptions) -> int:
    with contextlib.closing(LLM(engine.model, progress=False, **engine.options())) as llm:
        done = _profile(llm, options)
    show(done, options.top)
    if options.json is not None:
        write_json(done, options.json)
    if options.trace is not None:
        print(f"trace: {options.trace} (open it at https://ui.perfetto.dev)")
    return 0


def _profile(llm: LLM, options: ProfileOptions) -> Profile:
    info = llm.engine.info
    dtype, device = DTYPES[info.dtype], torch.device(info.device)
    least = floors(read_network(llm.processor.checkpoint.config, dtype.itemsize), device, dtype)
    sections = Workbench(llm, options, least).sections()
    timed = {section.name: _time(section, options.repeat, device) for section in sections}
    traced, recorded = _trace(sections, options, device)
    chip = least.chip
    rates = f"{chip.name}, {chip.bandwidth / 1e9:,.0f} GB/s, {chip.matrix / 1e12:,.2f} TFLOP/s"
    return Profile(
        where=f"{info.model} ({info.dtype}) on {device_name(info.device)}",
        ceilings=rates,
        sections=tuple(sections),
        timed=timed,
        found=read(cast(Any, recorded).events() or (), [section.name for section in sections]),
        traced=traced,
    )


def _time(section: Section, repeat: int, device: torch.device) -> Timed:
    walls, waits = [], []
    for number in range(WARM + repeat):
        _prepare(section, device)
        with watched() as clock:
            began = time.perf_counter()
            ran = section.run()
            wall = time.perf_counter() - began
        if number >= WARM:
            walls.append(wall / ran.times * 1e3)
            waits.append(clock.waited / ran.times * 1e3)
    return Timed(median(walls), median(waits), ran)


def _trace(
    sections: Sequence[Section], options: ProfileOptions, device: torch.device
) -> tuple[dict[str, Ran], profile]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    traced = {}
    with profile(activities=activities, acc_events=True) as recorded, watched():
        for section in sections:
            _prepare(section, device)
            with record_function(RANGE + section.name):
                traced[section.name] = section.run()
                _settle(device)
    if options.trace is not None:
        recorded.export_chrome_trace(str(options.trace))
    return traced, recorded


def _prepare(section: Section, device: torch.device) -> None:
    section.prepare()
    if not section.steady:
        _settle(device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
