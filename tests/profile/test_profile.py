"""`saccade profile`: what the trace says is what the table says."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from saccade import cli
from saccade.errors import ConfigError
from saccade.profile import trace
from saccade.profile.options import ProfileOptions
from saccade.profile.sections import watched
from saccade.runtime.runner import Launched
from saccade.vision.encode import Encoder


@dataclass
class Event:
    """As torch's profiler has them, in microseconds."""

    name: str
    start: float
    end: float
    where: str = "CUDA"
    device_time_total: float = 0.0

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
        Event("_split_kernel", 250, 400),  # overlaps, on another stream
        Event("nvjet_tst_128x64", 460, 500),
        Event("triton_norm", 510, 520),
        Event("nvjet_tst_128x64", 2000, 2100),  # of another section
        Event("aten::mm", 90, 95, "CPU"),
    ]
    found = trace.read(events, ["decode"])["decode"]
    assert [(one.name, one.kind, one.calls, one.microseconds) for one in found.kernels] == [
        ("nvjet_tst_128x64", "products", 2, 240.0),
        ("_split_kernel", "attention", 1, 150.0),
        ("triton_norm", "rest", 1, 10.0),
    ]
    assert (found.busy, found.idle, found.gaps) == (0.35, 0.07, (60, 10))
    assert found.of_kind("products") == 0.24


def test_ranges_count_their_kernels_on_a_device_and_their_time_on_a_host() -> None:
    section = Event("saccade.picture", 0, 100, "CPU")
    inner = Event("saccade.encode", 10, 40, "CPU", device_time_total=900)
    kernel = Event("k", 50, 60)
    assert trace.read([section, inner, kernel], ["picture"])["picture"].ranges == {"saccade.encode": 0.9}
    host = trace.read([section, inner, Event("aten::mm", 1, 3, "CPU")], ["picture"])["picture"]
    assert host.ranges == {"saccade.encode": 0.03}
    assert (host.busy, host.gaps, host.kernels[0].name) == (None, (), "aten::mm")


def test_watching_leaves_everything_as_it_was() -> None:
    before = Launched.wait, Encoder.attempt
    with pytest.raises(RuntimeError), watched():
        raise RuntimeError
    assert (Launched.wait, Encoder.attempt) == before


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"image_size": (0, 5)}, {"trace": Path("/nowhere/x.json")}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProfileOptions(**wrong)


def test_the_command_writes_a_table_a_trace_and_json(vl_folder: Path, tmp_path: Path) -> None:
    words = f"profile {vl_folder} --device cpu --num-blocks 128 --batch 2 --context 16 --image-size 64x64"
    words += f" --steps 2 --repeat 1 --trace {tmp_path}/t.json.gz --json {tmp_path}/p.json"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    for stage in ("picture", "preprocess", "vision tower", "prefill", "decode", "attention"):
        assert stage in done.output
    told = json.loads((tmp_path / "p.json").read_text())["sections"]
    assert list(told) == ["picture", "prefill", "decode"]
    assert told["decode"]["traced"] == 2
    assert (
        0
        < told["picture"]["found"]["ranges"]["saccade.preprocess"]
        < told["picture"]["found"]["ranges"]["saccade.encode"]
    )
    products = {one["name"]: one["calls"] for one in told["prefill"]["found"]["kernels"]}
    again = {one["name"]: one["calls"] for one in told["decode"]["found"]["kernels"]}
    assert again["aten::mm"] == 2 * products["aten::mm"]  # two steps, and nothing else runs beside them
    with gzip.open(tmp_path / "t.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"saccade.picture", "saccade.encode", "saccade.decode"} <= names


def test_what_does_not_fit_is_refused_with_the_numbers(vl_folder: Path) -> None:
    words = f"profile {vl_folder} --device cpu --num-blocks 8 --context 500"
    done = CliRunner().invoke(cli.app, words.split())
    assert isinstance(done.exception, ConfigError)
    assert "8 blocks" in str(done.exception)
