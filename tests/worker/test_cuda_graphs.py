"""Which shape a step takes, when it is captured, and what happens when it cannot be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.core import Engine
from saccade.engine.memory import graph_bytes
from saccade.errors import ConfigError
from saccade.inputs.processor import InputProcessor
from saccade.kernels.cuda_graph import PlainRecorder, Replay
from saccade.kernels.dispatch import KernelMode
from saccade.models.loader import load_model
from saccade.request import View
from saccade.step_plan import ScheduledSequence, Span
from saccade.worker import execution_mode as way
from saccade.worker.buckets import (
    DECODES,
    MAX_GRAPHS,
    PREFILL_TOKENS,
    PREFILLS,
    SplitBatch,
    StepShape,
    choose_shape,
    first_shapes,
    later_shapes,
    split_batch,
)
from saccade.worker.cuda_graphs import MAX_FAILURES, RETRY_AFTER, StepGraphCache
from saccade.worker.execution_mode import ExecutionMode, resolve_execution_mode
from saccade.worker.input_batch import PackedUpload, Slots

CPU = torch.device("cpu")


def row(number: int, start: int, count: int = 1, *, sample: bool = True, **other: Any) -> ScheduledSequence:
    positions = np.broadcast_to(np.arange(start, start + count, dtype=np.float32), (3, count))
    given: dict[str, Any] = {
        "seq_id": number,
        "slot": number,
        "start": start,
        "num_tokens": count,
        "tokens": (7,) * count,
        "positions": positions,
        "spans": (),
        "sample": sample,
        "output_position": 0,
        **other,
    }
    return ScheduledSequence(**given)


@given(
    st.lists(st.integers(0, 70_000), max_size=600),
    st.lists(st.tuples(st.integers(0, 300), st.integers(2, 40) | st.integers(2, 300)), max_size=40),
    st.integers(1, 600),
)
def test_a_shape_holds_its_batch_and_has_bucket_sizes(
    starts: list[int], prompts: list[tuple[int, int]], most: int
) -> None:
    rows = [row(i, start) for i, start in enumerate(starts)]
    rows += [row(1000 + i, start, count) for i, (start, count) in enumerate(prompts)]
    split = split_batch(rows)
    assert split is not None
    shape = choose_shape(split, "greedy", most, 100_000)
    if shape is None:
        tokens = sum(count for _, count in prompts)
        beyond = len(starts) > 256 if prompts else len(starts) > min(512, most)
        assert len(prompts) > PREFILLS[-1] or tokens > PREFILL_TOKENS[-1] or beyond or len(starts) > most
        return
    assert shape.decodes >= len(starts)
    assert shape.max_context > max(starts, default=0)
    assert (shape.prefills, shape.prefill_tokens) == (0, 0) if not prompts else shape.prefills >= len(prompts)
    assert shape.prefill_tokens >= sum(count for _, count in prompts)
    assert not prompts or (shape.prefill_tokens in PREFILL_TOKENS and shape.prefills in PREFILLS)
    assert prompts or shape.decodes in DECODES


def test_batches_that_no_graph_step_supports_are_not_split() -> None:
    view = View(content=b"c" * 32, box=(0, 0, 8, 8), grid=(2, 2), merge=2, processing=b"p" * 32)
    assert split_batch([row(0, 5), row(1, 3, 4, tokens=(1, 2, 3))]) is None  # its last token is on the device
    looking = split_batch([row(0, 5, relevance_targets=(1,)), row(1, 5)])
    assert looking is not None
    assert looking.has_relevance_targets
    assert [one.slot for one in looking.prefills] == [0]
    seeing = split_batch([row(0, 5), row(1, 5, spans=(Span(start=5, view=view, key=b"k"),))])
    assert seeing is not None
    assert [len(seeing.decodes), len(seeing.prefills), seeing.has_visual] == [1, 1, True]
    plain = split_batch([row(0, 5), row(1, 5, 3)])
    assert plain is not None
    assert choose_shape(seeing, "greedy", 64, 900) != choose_shape(plain, "greedy", 64, 900)
    bent = np.array([[3.0], [4.0], [3.0]], dtype=np.float32)
    split = split_batch([row(0, 3, positions=bent), row(1, 8, sample=False), row(2, 9)])
    assert split is not None
    assert [one.slot for one in split.decodes] == [2]
    assert [one.slot for one in split.prefills] == [0, 1]


def test_early_exit_steps_have_smaller_shapes() -> None:
    def sizes(ending: str, *counts: int) -> tuple[int, int]:
        split = split_batch(
            [row(number, 70, count, relevance_targets=(1,)) for number, count in enumerate(counts)]
        )
        assert split is not None
        shape = choose_shape(split, ending, 64, 900)
        assert shape is not None
        return shape.prefill_tokens, shape.prefills

    assert [sizes("early_exit", count) for count in (2, 32, 33, 65)] == [(32, 1), (32, 1), (64, 1), (128, 1)]
    assert [sizes("early_exit", *[3] * count) for count in (2, 8, 9)] == [(32, 8), (32, 8), (32, 32)]
    assert sizes("greedy", 20) == (64, 8)
    later = later_shapes(64, 900, visual=True, early_exit=True)
    looks = [(shape.prefill_tokens, shape.prefills) for shape in later if shape.ending == "early_exit"]
    assert looks == [(32, 1), (64, 1), (32, 8), (64, 8)]
    assert not any(shape.ending == "early_exit" for shape in later_shapes(64, 900, visual=True))


def test_first_shapes_come_largest_first_and_end_at_max_seqs() -> None:
    decodes = [shape for shape in first_shapes(20, 9000) if not shape.prefills]
    assert [shape.decodes for shape in decodes] == [24, 16, 8, 4, 2, 1]
    prefills = [shape.prefill_tokens for shape in first_shapes(20, 9000) if shape.prefills]
    assert prefills == sorted(PREFILL_TOKENS)[::-1]
    assert {shape.max_context for shape in first_shapes(20, 9000)} == {4096}
    assert {shape.max_context for shape in first_shapes(20, 900)} == {900}
    assert max(shape.decodes for shape in first_shapes(512, 9000)) == 64


def test_later_shapes_are_the_rest_and_all_fit() -> None:
    first, later = first_shapes(256, 9000), later_shapes(256, 9000, visual=True, early_exit=True)
    assert not set(first) & set(later)
    assert len(set(later)) == len(later)
    assert len(first) + len(later) <= MAX_GRAPHS
    for rows in (1, 5, 200, 256):
        for ending in ("greedy", "sampled"):
            assert any(shape.decodes >= rows and shape.ending == ending for shape in later)


class Script:
    """A recorder that fails as told, and a step and sampler that do nothing."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    def record(self, function: Callable[[], None]) -> Replay:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return PlainRecorder().record(function)

    def fill_with_padding(self, shape: StepShape) -> None:
        pass

    def run(self, shape: StepShape, *, compile_only: bool = False) -> None:
        pass

    takes_visual = keeps_hidden_states = True

    def supports(self, split: SplitBatch) -> bool:
        return True

    def graph_ending(self, rows: tuple[ScheduledSequence, ...]) -> str:
        return "greedy"


def graphs(script: Script, **options: int) -> StepGraphCache:
    return StepGraphCache(script, script, script, 64, 4096, **options)  # type: ignore[arg-type]


def test_a_capture_without_memory_is_retried_later(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(torch.OutOfMemoryError("no room"), torch.OutOfMemoryError("still none"))
    made = graphs(script)
    assert made.find((row(0, 5),)) is None
    for _ in range(RETRY_AFTER - 1):
        assert made.find((row(0, 5),)) is None
    assert script.calls == 1
    assert made.find((row(0, 5),)) is None  # the second try, as vain
    assert made.find((row(0, 5), row(1, 5))) is not None  # other shapes are not concerned
    for _ in range(RETRY_AFTER):
        made.find((row(1, 5),))
    assert made.find((row(0, 5),)) is not None
    assert caplog.text.count("cannot be captured") == 1
    assert script.calls == 4


def test_a_shape_that_never_captures_is_given_up() -> None:
    script = Script(*[RuntimeError("operation not permitted when stream is capturing")] * 9)
    made = graphs(script)
    for _ in range(RETRY_AFTER * (MAX_FAILURES + 2)):
        assert made.find((row(0, 5),)) is None
    assert script.calls == MAX_FAILURES


def test_prefill_shapes_are_captured_after_min_uses() -> None:
    script = Script()
    made = graphs(script, min_uses=3)
    prompt = (row(0, 0, 20),)
    assert [made.find(prompt) is None for _ in range(4)] == [True, True, False, False]
    assert script.calls == len(made) == 1


def test_an_idle_engine_captures_one_shape_at_a_time() -> None:
    script = Script(RuntimeError("no"))
    made = graphs(script)
    made.warm_up(progress=False)
    warm = script.calls
    captured = [made.capture_next() for _ in range(MAX_GRAPHS)]
    assert captured == sorted(captured, reverse=True)
    assert script.calls == warm + sum(captured)
    assert len(made) == script.calls - 1  # the one that failed is not tried again while idle
    assert made.find((row(0, 5), row(1, 0, 20))) is not None
    assert script.calls == warm + sum(captured)


def test_relevance_steps_use_the_graphs_of_other_prefills() -> None:
    """Those of other prompts."""
    script = Script()
    made = graphs(script, min_uses=3)
    made.warm_up(progress=False)
    while made.capture_next():
        pass
    view = View(content=b"c" * 32, box=(0, 0, 8, 8), grid=(2, 2), merge=2, processing=b"p" * 32)
    span = (Span(start=5, view=view, key=b"k"),)
    for spans in ((), span):
        for count in (20, 100, 190, 500):
            found = made.find((row(0, 5, count, sample=False, spans=spans, relevance_targets=(1,)),))
            assert found is not None
            assert found[1].prefill_tokens >= count
    several = tuple(row(number, 5, 20, sample=False, relevance_targets=(1,)) for number in range(9))
    assert made.find(several) is None, "more prompts than are captured before they come"


def test_only_an_idle_engine_warms_up(vl_folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(vl_folder), device="cpu", graphs="on", num_blocks=64))
    front = InputProcessor(open_checkpoint(str(vl_folder)), 4096)
    params = SamplingParams(max_tokens=4, temperature=0)
    engine.submit(front.prepare_prompt("The eye jumps", params, "a", trusted=True))
    assert not engine.warm_up()
    first = drain(engine)
    while engine.warm_up():
        pass
    engine.submit(front.prepare_prompt("The eye jumps", params, "b", trusted=True))
    assert drain(engine) == first
    engine.check()


def drain(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens


def test_the_host_knows_the_state_of_slots() -> None:
    slots = Slots(4, 8, CPU)
    assert not slots.is_current(row(1, 9))
    slots.advance(row(1, 5, 4), uploaded=True)
    assert slots.is_current(row(1, 9))
    apart = np.full((3, 1), 30, dtype=np.float32)
    assert not slots.is_current(row(1, 9, positions=apart))  # pictures take fewer positions than tokens
    slots.advance(row(1, 9, positions=apart), uploaded=True)
    assert slots.is_current(row(1, 10, positions=apart + 1))
    slots.advance(row(1, 10, positions=apart + 1), uploaded=False)
    assert slots.is_current(row(1, 11, positions=apart + 2))
    assert not slots.is_current(row(1, 12))
    slots.reset(1)
    assert not slots.is_current(row(1, 11))
    slots.advance(row(1, 5, 4, sample=False), uploaded=True)
    assert not slots.is_current(row(1, 9))


def test_a_steady_decode_step_uploads_nothing(vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a step of the same rows, none of which needs a block, sends anything to the device."""
    engine = Engine(EngineConfig(model=str(vl_folder), device="cpu", graphs="on", num_blocks=64))
    sent: list[int] = []
    monkeypatch.setattr("saccade.worker.input_batch.PackedUpload.send", _counted(sent))
    front = InputProcessor(open_checkpoint(str(vl_folder)), 4096)
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=40, temperature=0)
        engine.submit(front.prepare_prompt("The eye jumps", params, name, trusted=True))
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
    assert engine.graph_replays >= 39
    assert len(sent) <= steps - 39 + 2 * (40 // 16 + 1)  # prompts, the first decode, a block each 16 tokens


def _counted(sent: list[int]) -> Callable[..., Any]:
    plain = PackedUpload.send

    def send(self: PackedUpload, device: torch.device) -> torch.Tensor:
        sent.append(1)
        return plain(self, device)

    return send


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def test_impossible_execution_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ExecutionMode(KernelMode("auto"), False, False)
    assert resolve_execution_mode(config(), CPU, torch.float32) == plain
    assert resolve_execution_mode(config(graphs="on"), CPU, torch.float32).graphs
    with pytest.raises(ConfigError, match="early_launch is on"):
        resolve_execution_mode(config(graphs="on", early_launch="on"), CPU, torch.float32)
    monkeypatch.setattr(way, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="kernels is triton"):
        resolve_execution_mode(config(kernels="triton"), CPU, torch.float32)


def test_pdl_needs_compute_capability_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "TRITON", True)
    monkeypatch.setattr(way, "_capturable", lambda mode, device, dtype: mode.kernels == "triton")
    cuda = torch.device("cuda")
    for capability, able in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert resolve_execution_mode(config(kernels="triton"), cuda, torch.bfloat16).pdl is able
        off = config(kernels="triton", early_launch="off")
        assert not resolve_execution_mode(off, cuda, torch.bfloat16).pdl
        if not able:
            with pytest.raises(ConfigError, match=r"9\.0"):
                resolve_execution_mode(config(kernels="triton", early_launch="on"), cuda, torch.bfloat16)
    assert not resolve_execution_mode(config(), cuda, torch.bfloat16).graphs
    with pytest.raises(ConfigError, match="graphs is on"):
        resolve_execution_mode(config(graphs="on"), cuda, torch.bfloat16)


def test_graphs_of_long_contexts_are_budgeted(vl_folder: Path) -> None:
    model = load_model(open_checkpoint(str(vl_folder)), "cpu", torch.float32)
    short, long = (graph_bytes(model, 256, length, torch.bfloat16) for length in (4096, 262_144))
    assert long > short
    assert graph_bytes(model, 512, 4096, torch.bfloat16) > short
