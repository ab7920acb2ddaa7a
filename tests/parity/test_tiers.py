"""Greedy output equals transformers' however features move between tiers, leave them, outlive the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.config import VisionCache
from saccade.encoder.cache import disk
from saccade.engine.core import Engine
from tests.parity.oracle import picture
from tests.parity.test_engine import IMAGE, PICTURES, Bench, Question, bench, run

__all__ = ["bench"]

VIEW = 4 * (64 + 64) * 4 * 16  # bytes of a view's features, about: 16 tokens


@pytest.fixture(autouse=True)
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for every read, however busy the machine is."""
    monkeypatch.setattr(disk, "READ_SECONDS", 60.0)


def closed(engine: Engine) -> Engine:
    """As a server ends: what waits to be written is."""
    engine.close()
    engine.check()
    return engine


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(
    "tiers",
    [
        VisionCache(gpu=VIEW, host=1 << 30),
        VisionCache(gpu=0, host=1 << 30),
        VisionCache(gpu=VIEW, host=2 * VIEW),
        VisionCache(gpu=VIEW, host=VIEW, disk=1 << 30, dir="here"),
        VisionCache(gpu=0, host=0, disk=1 << 30, dir="here"),
        VisionCache(gpu=VIEW, host=VIEW, disk=8 * VIEW, dir="here"),
        VisionCache(gpu=VIEW, host=VIEW, ttl=1e-9),
    ],
    ids=["host", "host only", "little", "disk", "disk only", "little disk", "short-lived"],
)
def test_tier_moves_change_no_token(
    bench: Callable[[str], Bench],
    tiers: VisionCache,
    overlap: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    peers = bench("qwen3_vl")
    engine = peers.engine(
        vision_cache=tiers, prefix_caching=False, max_num_batched_tokens=33, overlap=overlap
    )
    for questions in (PICTURES, PICTURES[::-1], PICTURES[1:3] * 2):
        peers.check(engine, questions)
    stats = closed(engine).stats().features
    if tiers.host > VIEW and not tiers.ttl:
        assert stats.host.hits
    if tiers.disk > 8 * VIEW:
        assert stats.disk.hits or stats.host.hits
        assert stats.writes


def test_a_restarted_engine_answers_from_disk_without_the_vision_tower(
    bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    peers = bench("qwen3_vl")
    tiers = VisionCache(disk=1 << 30, dir=str(tmp_path))
    first = peers.engine(vision_cache=tiers)
    peers.check(first, PICTURES)
    assert first.stats().encodes
    closed(first)
    again = peers.engine(vision_cache=tiers)
    peers.check(again, PICTURES)
    assert again.stats().encodes == 0
    assert again.stats().features.disk.hits > 0
    closed(again)


def test_files_of_another_model_are_not_taken_for_this_ones(
    bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    tiers = VisionCache(disk=1 << 30, dir=str(tmp_path))
    closed_first = bench("qwen3_vl").engine(vision_cache=tiers)
    bench("qwen3_vl").check(closed_first, PICTURES[:2])
    closed(closed_first)
    other = bench("qwen3_vl_tied")
    engine = other.engine(vision_cache=tiers)
    other.check(engine, PICTURES[:2])
    assert engine.stats().encodes == 2
    closed(engine)


@pytest.mark.parametrize("harm", ["damaged", "deleted", "swapped"])
def test_damaged_files_cost_an_encode_and_change_no_token(
    bench: Callable[[str], Bench], tmp_path: Path, harm: str
) -> None:
    peers = bench("qwen3_vl")
    tiers = VisionCache(disk=1 << 30, dir=str(tmp_path))
    first = peers.engine(vision_cache=tiers)
    peers.check(first, PICTURES[:3])
    closed(first)
    engine = peers.engine(vision_cache=tiers)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    contents = [file.read_bytes() for file in files]
    for file, other in zip(files, [*contents[1:], contents[0]], strict=True):
        if harm == "deleted":
            file.unlink()
        else:
            file.write_bytes(other if harm == "swapped" else other[:-1])
    peers.check(engine, PICTURES[:3])
    assert engine.stats().encodes == 3
    assert engine.stats().features.failed_reads == 3
    closed(engine)


def test_features_evicted_during_a_conversation_change_no_token(
    bench: Callable[[str], Bench],
) -> None:
    """The second question's beginning is in the KV cache; the image's features are not there any more."""
    peers = bench("qwen3_vl")
    engine = peers.engine(vision_cache=VisionCache(gpu=0), block_size=4)
    shown = [picture(100, 80, 21)]
    first = Question(IMAGE + "What colour is the house?", shown)
    peers.check(engine, [first])
    encodes = engine.stats().encodes
    for text in (first.text + " And the boat?", first.text + " And the roof?"):
        peers.check(engine, [Question(text, shown)])
    assert engine.stats().encodes == encodes
    peers.check(engine, [Question("Look " + IMAGE, shown)])  # elsewhere in a prompt it is encoded again
    assert engine.stats().encodes == encodes + 1


def test_deleting_between_and_during_questions_changes_no_token(bench: Callable[[str], Bench]) -> None:
    peers = bench("qwen3_vl")
    engine = peers.engine(vision_cache=VisionCache(host=1 << 30), max_num_batched_tokens=7, block_size=4)
    requests = [peers.request(question) for question in PICTURES]
    for request in requests:
        engine.submit(request)
    answers: dict[str, list[int]] = {}
    turn = 0
    while not engine.idle:
        for delta in engine.step():
            answers.setdefault(delta.request_id, []).extend(delta.tokens)
        media = [media for request in requests for media in request.media]
        engine._encoder_cache.delete_image(media[turn % len(media)].view.content)
        engine.check()
        turn += 1
    for question, request in zip(PICTURES, requests, strict=True):
        assert answers[request.id] == peers.expected(question)
    assert engine.stats().features.gpu.entries < len(PICTURES)
    assert run(engine, [peers.request(PICTURES[0])])
