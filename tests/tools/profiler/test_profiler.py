"""`saccade profile`: what the trace says is what the table says."""

import contextlib
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from saccade.cli import app as cli
from saccade.encoder.encoder_runner import EncoderRunner
from saccade.engine.cost_prior import H200, read_model_size
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.step_plan import StepPlan
from saccade.tools.options import ProfileOptions
from saccade.tools.profiler import trace
from saccade.tools.profiler.command import Profile, SectionTime, show
from saccade.tools.profiler.floors import Floors
from saccade.tools.profiler.sections import (
    ENCODE,
    PREPROCESS,
    Section,
    SectionFactory,
    SectionRun,
    instrumented,
)
from saccade.tools.profiler.trace import KernelTime, SectionTrace
from saccade.worker.model_runner import LaunchedStep, ModelRunner


@dataclass
class Event:
    """As torch's profiler has them, in microseconds."""

    name: str
    start: float
    end: float
    where: str = "CUDA"
    id: int = 0

    @property
    def device_type(self) -> Any:
        return SimpleNamespace(name=self.where)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start, end=self.end)

    @property
    def cpu_time_total(self) -> float:
        return self.end - self.start

    @property
    def self_cpu_time_total(self) -> float:
        return self.cpu_time_total


def test_kernels_belong_to_their_section_and_gaps_are_between_them() -> None:
    events = [
        Event("saccade.decode", 0, 1000, "CPU"),
        Event("saccade.decode", 0, 1000),  # its shadow on the device is no kernel
        Event("nvjet_tst_128x64", 100, 300),
        Event("_split_kernel", 250, 400),  # launched early: it waits for the one before
        Event("nvjet_tst_128x64", 460, 500),
        Event("triton_norm", 510, 520),
        Event("nvjet_tst_128x64", 2000, 2100),  # of another section
        Event("aten::mm", 90, 95, "CPU"),
    ]
    found = trace.read(events, ["decode"])["decode"]
    assert [(one.name, one.kind, one.calls, one.microseconds) for one in found.kernels] == [
        ("nvjet_tst_128x64", "products", 2, 240.0),
        ("_split_kernel", "attention", 1, 100.0),
        ("triton_norm", "rest", 1, 10.0),
    ]
    assert (found.busy, found.idle, found.gaps) == (0.35, 0.07, (60, 10))
    assert found.of_kind("products") == 0.24
    assert sum(one.microseconds for one in found.kernels) == 350


def test_kernels_beside_a_copy_count_in_full() -> None:
    events = [
        Event("saccade.decode", 0, 9000, "CPU"),
        Event("Memcpy DtoH", 100, 5100),
        Event("one", 110, 2500),
        Event("other", 2510, 5000),
    ]
    found = trace.read(events, ["decode"])["decode"]
    assert {one.name: one.microseconds for one in found.kernels} == {
        "Memcpy DtoH": 5000,
        "one": 2390,
        "other": 2490,
    }


def test_kernels_of_a_graph_belong_to_the_range_that_launched_it() -> None:
    """They run when the host has long left it, and their ids are those of operators too."""
    host = [
        Event("saccade.image", 0, 1000, "CPU"),
        Event("saccade.encode", 10, 40, "CPU"),
        Event("saccade.preprocess", 12, 18, "CPU"),
        Event("cuLaunchKernelEx", 13, 14, "CPU", 5),
        Event("cudaGraphLaunch", 20, 22, "CPU", 7),
        Event("cudaGraphLaunch", 30, 32, "CPU", 8),
        Event("cudaGraphLaunch", 50, 55, "CPU", 9),
        Event("aten::index", 60, 70, "CPU", 7),
    ]
    device = [
        Event("_patchify_kernel", 100, 110, id=5),
        *(Event("tower", 110 + 50 * number, 160 + 50 * number, id=7 + number // 3) for number in range(6)),
        Event("saccade.encode", 100, 410),
        Event("step", 420, 500, id=9),
        Event("step", 500, 600, id=9),
    ]
    found = trace.read(host + device, ["image"])["image"]
    assert found.ranges == {"saccade.encode": 0.31, "saccade.preprocess": 0.01}
    assert (found.elsewhere, found.busy, found.lost) == (0.18, 0.49, 0)


def test_a_kernel_without_a_launch_is_counted() -> None:
    events = [Event("saccade.prefill", 0, 100, "CPU"), Event("k", 50, 60, id=3)]
    assert trace.read(events, ["prefill"])["prefill"].lost == 1


def test_steps_are_separated_by_their_launches_and_copies_do_not_fill_the_gap_between_them() -> None:
    """Launched while the step before runs; what ran before the section was launched is no part of it."""
    events = [
        Event("cudaGraphLaunch", 0, 5, "CPU", 1),
        Event("saccade.decode", 10, 900, "CPU"),
        *(Event("saccade.step", 10 + 100 * number, 100 + 100 * number, "CPU") for number in range(3)),
        *(
            Event("cudaMemcpyAsync", 20 + 100 * number, 25 + 100 * number, "CPU", 10 + number)
            for number in range(3)
        ),
        *(
            Event("cudaGraphLaunch", 30 + 100 * number, 35 + 100 * number, "CPU", 20 + number)
            for number in range(3)
        ),
        Event("before", 10, 95, id=1),
        Event("Memcpy HtoD", 60, 62, id=10),
        Event("first", 100, 150, id=20),
        Event("first", 151, 200, id=20),
        Event("Memcpy HtoD", 190, 192, id=11),
        Event("second", 207, 300, id=21),
        Event("Memcpy HtoD", 310, 312, id=12),
        Event("third", 360, 400, id=22),
    ]
    found = trace.read(events, ["decode"])["decode"]
    assert list(found.between) == [7, 60]
    assert "before" not in [one.name for one in found.kernels]
    assert found.ranges["saccade.step"] == found.busy
    assert found.elsewhere == 0


def test_without_a_device_ranges_are_times_of_the_host() -> None:
    section = Event("saccade.image", 0, 100, "CPU")
    inner = Event("saccade.encode", 10, 40, "CPU")
    host = trace.read([section, inner, Event("aten::mm", 1, 3, "CPU")], ["image"])["image"]
    assert (host.ranges, host.elsewhere) == ({"saccade.encode": 0.03}, 0.07)
    assert (host.busy, host.gaps, host.kernels[0].name) == (None, (), "aten::mm")


def test_watching_leaves_everything_as_it_was() -> None:
    before = LaunchedStep.wait, EncoderRunner.try_encode
    with pytest.raises(RuntimeError), instrumented():
        raise RuntimeError
    assert (LaunchedStep.wait, EncoderRunner.try_encode) == before


@pytest.mark.parametrize("overlap", [True, False])
def test_decode_runs_steps_of_all_sequences_and_of_nothing_else(
    vl_folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Though the prompts take more steps than are timed; and the floor is that of what was read."""
    sent: list[StepPlan] = []
    launch = ModelRunner.execute

    def seen(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        sent.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", seen)
    options = ProfileOptions(batch=12, context=16, steps=3)
    settings: dict[str, Any] = {"num_blocks": 128, "max_num_batched_tokens": 24, "overlap": overlap}
    with contextlib.closing(LLM(str(vl_folder), device="cpu", progress=False, **settings)) as llm:
        network = read_model_size(llm.processor.checkpoint.config, 4)
        section = SectionFactory(llm, options, Floors(network, H200)).sections()[-1]
        for _ in range(2):
            section.prepare()
            prompts = len(sent)
            ran = section.run()
            steps = sent[prompts:]
            assert prompts > 8
            assert [len(plan.scheduled) for plan in steps] == [12] * 3
            assert all(row.num_tokens == 1 and row.start >= 16 for plan in steps for row in plan.scheduled)
            assert not any(plan.new_slots or plan.encodes for plan in steps)
            read = sum(row.start + 1 for plan in steps for row in plan.scheduled) / 36
            # What is timed is what was learnt, which is one step behind where loops overlap.
            assert ran.what.startswith(f"12 sequences of {round(read - overlap)} tokens")
            assert (ran.times, ran.floor) == (3, Floors(network, H200).decode(12, round(read - overlap)))
            sent.clear()


def test_sequences_that_cannot_decode_together_are_refused(vl_folder: Path) -> None:
    words = f"profile {vl_folder} --device cpu --num-blocks 64 --batch 9 --context 16 --image-size 64x64"
    done = CliRunner().invoke(cli.app, [*words.split(), "--max-num-batched-tokens", "8"])
    assert isinstance(done.exception, ConfigError)
    assert "lower --batch" in str(done.exception)


def test_the_tables_divide_by_the_steps_and_tell_the_gaps_between_them() -> None:
    def nothing() -> SectionRun:
        raise AssertionError

    kernels = (
        KernelTime("nvjet", "products", 8, 20_000.0),
        KernelTime("_split_kernel", "attention", 4, 4_000.0),
    )
    step = SectionRun(4, "one step", 5.0, {"products": 4.0, "attention": 0.5})
    look = SectionRun(1, "an image", 20.0, {PREPROCESS: 0.01, ENCODE: 8.0})
    done = Profile(
        where="here",
        ceilings="high",
        sections=tuple(Section(name, lambda: None, nothing) for name in ("image", "decode")),
        timed={"image": SectionTime(40.0, 30.0, look), "decode": SectionTime(6.25, 6.0, step)},
        traces={
            "image": SectionTrace(kernels, 24.0, 1.0, (80.0,), {PREPROCESS: 0.2, ENCODE: 10.2}, 13.8, (), 2),
            "decode": SectionTrace(kernels, 24.0, 0.8, (60.0, 9.0), {}, 0.0, (9.0, 60.0, 0.0)),
        },
        runs={"image": look, "decode": step},
    )
    console = Console(file=io.StringIO())
    show(done, 12, console)
    shown = " ".join(console.file.getvalue().replace("│", " ").split())  # type: ignore[attr-defined]
    for line in (
        "vision tower 10.0 8.00 80%",
        "prefill 13.8 12.0 87%",
        "no kernel 16.0",
        "products 5.00 4.00 80%",
        "no kernel 0.25",
        "nvjet products 2.00 5,000 83.3%",
        "In all 1 gaps longer than 50 us, the longest 80 us. 2 kernels have no launch in the trace",
        "decode, of one, the mean of 4: kernels ran for 6.00 ms, none for 0.20 ms between them.",
        "From a step to the next, 3 times: 1 gaps longer than 50 us, the longest 60 us, 23 us the mean.",
    ):
        assert line in shown, line


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"image_size": (0, 5)}, {"trace": Path("/nowhere/x.json")}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProfileOptions(**wrong)


def test_the_command_writes_a_table_a_trace_and_json(vl_folder: Path, tmp_path: Path) -> None:
    words = f"profile {vl_folder} --device cpu --num-blocks 128 --batch 2 --context 16 --image-size 64x64"
    words += f" --steps 2 --repeat 1 --trace {tmp_path}/t.json.gz --json {tmp_path}/p.json"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    for stage in ("image", "preprocess", "vision tower", "prefill", "decode", "attention"):
        assert stage in done.output
    shown = json.loads((tmp_path / "p.json").read_text())["sections"]
    assert list(shown) == ["image", "prefill", "decode"]
    assert shown["decode"]["traced"] == 2
    assert (
        0
        < shown["image"]["found"]["ranges"]["saccade.preprocess"]
        < shown["image"]["found"]["ranges"]["saccade.encode"]
    )
    products = {one["name"]: one["calls"] for one in shown["prefill"]["found"]["kernels"]}
    again = {one["name"]: one["calls"] for one in shown["decode"]["found"]["kernels"]}
    assert again["aten::mm"] == 2 * products["aten::mm"]  # two steps, and nothing else runs beside them
    with gzip.open(tmp_path / "t.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"saccade.image", "saccade.encode", "saccade.decode"} <= names


def test_what_does_not_fit_is_refused_with_the_numbers(vl_folder: Path) -> None:
    words = f"profile {vl_folder} --device cpu --num-blocks 8 --context 500"
    done = CliRunner().invoke(cli.app, words.split())
    assert isinstance(done.exception, ConfigError)
    assert "8 blocks" in str(done.exception)
