"""`saccade profile`: warms up every section, times it without the profiler, then traces all of them once."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from saccade.config import EngineConfig
from saccade.engine.cost_prior import read_model_size
from saccade.engine.memory import DTYPES
from saccade.llm import LLM
from saccade.tools.environment import device_name
from saccade.tools.options import ProfileOptions
from saccade.tools.profiler.floors import floors
from saccade.tools.profiler.report import Profile, SectionTime, show, write_json
from saccade.tools.profiler.sections import Section, SectionFactory, SectionRun, instrumented
from saccade.tools.profiler.trace import RANGE, read
from saccade.tools.report import median

WARMUP_RUNS = 2  # per section: kernels are compiled, CUDA graphs captured


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
    bounds = floors(read_model_size(llm.processor.checkpoint.config, dtype.itemsize), device, dtype)
    sections = SectionFactory(llm, options, bounds).sections()
    timed = {section.name: _time(section, options.repeat, device) for section in sections}
    traced, recorded = _trace(sections, options, device)
    chip = bounds.chip
    rates = f"{chip.name}, {chip.bandwidth / 1e9:,.0f} GB/s, {chip.matrix / 1e12:,.2f} TFLOP/s"
    return Profile(
        where=f"{info.model} ({info.dtype}) on {device_name(info.device)}",
        ceilings=rates,
        sections=tuple(sections),
        timed=timed,
        traces=read(cast(Any, recorded).events() or (), [section.name for section in sections]),
        runs=traced,
    )


def _time(section: Section, repeat: int, device: torch.device) -> SectionTime:
    walls, waits = [], []
    for number in range(WARMUP_RUNS + repeat):
        _prepare(section, device)
        with instrumented() as clock:
            start = time.perf_counter()
            ran = section.run()
            wall = time.perf_counter() - start
        if number >= WARMUP_RUNS:
            walls.append(wall / ran.times * 1e3)
            waits.append(clock.waited / ran.times * 1e3)
    return SectionTime(median(walls), median(waits), ran)


def _trace(
    sections: Sequence[Section], options: ProfileOptions, device: torch.device
) -> tuple[dict[str, SectionRun], profile]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    traced = {}
    with profile(activities=activities, acc_events=True) as recorded, instrumented():
        for section in sections:
            _prepare(section, device)
            with record_function(RANGE + section.name):
                traced[section.name] = section.run()
                _synchronize(device)
    if options.trace is not None:
        recorded.export_chrome_trace(str(options.trace))
    return traced, recorded


def _prepare(section: Section, device: torch.device) -> None:
    section.prepare()
    if not section.steady:
        _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
