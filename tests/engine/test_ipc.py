"""The channel between front and engine: what goes in comes out, and nothing is left behind."""

import gc
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from saccade.engine.ipc import Cancel, Channel, StepOutputs, Submit, ToEngine, ToFrontend
from saccade.errors import EngineDied
from saccade.inputs.media.decode import OPAQUE, rgb_of_words, words_of_rgb
from saccade.lod.types import ImageMaps, RelevanceMaps
from saccade.metrics import EngineStats
from saccade.request import NO_PIXELS, Delta, Media, Request, Sampling, TokenLogprobs, View, ZoomResult


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)


def request_with(*pictures: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Request:
    media = tuple(
        Media(slot, View(bytes([slot]) * 32, (0, 0, 64, 64), (4, 4), 2, b"p"), pixels)
        for slot, pixels in enumerate(pictures)
    )
    sampling = Sampling(max_tokens=3, logit_bias={5: -1.5}, stop_token_ids=(1, 2), seed=9)
    return Request(id="r", prompt=tuple(range(len(pictures) + 2)), media=media, sampling=sampling, salt=b"s")


def test_a_request_arrives_as_it_was_sent_pixels_included() -> None:
    front, engine = pair()
    sent = request_with(picture(64, 48), picture(33, 17, seed=1))
    front.send(Submit(sent))
    got = engine.receive(ToEngine).request
    assert (got.id, got.prompt, got.sampling, got.salt) == (sent.id, sent.prompt, sent.sampling, sent.salt)
    for ours, theirs in zip(sent.media, got.media, strict=True):
        assert ours.view == theirs.view
        assert np.array_equal(ours.pixels, theirs.pixels)


def test_received_pixels_may_be_written_without_reaching_the_sender() -> None:
    front, engine = pair()
    pixels = picture(8, 8)
    original = pixels.copy()
    front.send(Submit(request_with(pixels)))
    engine.receive(ToEngine).request.media[0].pixels[:] = 0
    assert np.array_equal(pixels, original)


def test_non_contiguous_pixels_arrive() -> None:
    front, engine = pair()
    pixels = picture(16, 16)[:, ::2, ::-1]
    front.send(Submit(request_with(pixels)))
    assert np.array_equal(engine.receive(ToEngine).request.media[0].pixels, pixels)


def test_images_without_pixels_arrive_beside_others() -> None:
    front, engine = pair()
    sent = request_with(NO_PIXELS, picture(8, 8), NO_PIXELS)
    front.send(Submit(sent))
    got = [item.pixels for item in engine.receive(ToEngine).request.media]
    assert [pixels.shape for pixels in got] == [item.pixels.shape for item in sent.media]
    assert np.array_equal(got[1], sent.media[1].pixels)


def test_rgbx_pixels_arrive_as_rgbx_at_any_offset() -> None:
    front, engine = pair()
    words = np.random.default_rng(2).integers(0, 1 << 32, (5, 7), dtype=np.uint32) | OPAQUE
    sent = request_with(
        picture(3, 3), rgb_of_words(words), NO_PIXELS, picture(1, 1), rgb_of_words(words[:2].copy())
    )
    front.send(Submit(sent))
    got = [item.pixels for item in engine.receive(ToEngine).request.media]
    for ours, theirs in zip(sent.media, got, strict=True):
        assert np.array_equal(ours.pixels, theirs)
    found = [words_of_rgb(pixels) for pixels in got]
    assert [one is not None for one in found] == [False, True, False, False, True]
    assert found[1] is not None
    assert np.array_equal(words, found[1])  # the fourth byte too


@pytest.mark.parametrize(
    "has_content", [{"offset": 64}, {"offset": -16}, {"shape": [1, 9, 9, 3]}, {"offset": 1}]
)
def test_pixels_outside_the_shared_memory_are_rejected(
    has_content: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, engine = pair()
    told = {"offset": 0, "shape": [1, 4, 4, 3], "words": True} | has_content
    pack = msgspec.msgpack.encode

    def lie(message: object, enc_hook: Callable[[object], object]) -> bytes:
        return pack(message, enc_hook=lambda value: enc_hook(value) and told)

    monkeypatch.setattr(msgspec.msgpack, "encode", lie)
    front.send(Submit(request_with(picture(6, 4))))
    with pytest.raises((ValueError, msgspec.ValidationError)):
        engine.receive(ToEngine)


def test_messages_keep_their_order_and_boundaries_across_threads() -> None:
    front, engine = pair()
    requests = [request_with(picture(200, 300, seed)) if seed % 3 else request_with() for seed in range(40)]

    def send_all() -> None:
        for index, request in enumerate(requests):
            front.send(Submit(request))
            front.send(Cancel(str(index)))

    sender = threading.Thread(target=send_all)
    sender.start()
    for index, sent in enumerate(requests):
        got = engine.receive(ToEngine).request
        assert [m.pixels.tobytes() for m in got.media] == [m.pixels.tobytes() for m in sent.media]
        assert engine.receive(ToEngine) == Cancel(str(index))
    sender.join()


def test_step_outputs_with_logprobs_arrive() -> None:
    front, engine = pair()
    logprobs = (TokenLogprobs(-0.5, ((3, -0.5), (4, -1.5))),)
    news = StepOutputs(
        (Delta(request_id="r", tokens=(3,), logprobs=logprobs, finish="stop"),), EngineStats(steps=7)
    )
    engine.send(news)
    assert front.receive(ToFrontend) == news


def test_a_closed_channel_gives_none_to_the_reader_and_an_error_to_the_writer() -> None:
    front, engine = pair()
    engine.close()
    assert front.receive(ToFrontend) is None
    with pytest.raises(EngineDied):
        front.send(Submit(request_with(picture(64, 64))))


def test_close_wakes_a_blocked_reader() -> None:
    front, _engine = pair()
    got: list[object] = ["nothing yet"]
    reader = threading.Thread(target=lambda: got.append(front.receive(ToFrontend)))
    reader.start()
    front.close()
    reader.join(timeout=10)
    assert not reader.is_alive()
    assert got[-1] is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_shared_memory_is_released_at_once() -> None:
    front, engine = pair()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = []
    for seed in range(20):
        front.send(Submit(request_with(picture(64, 64, seed))))
        kept.append(engine.receive(ToEngine))  # a waiting request holds no descriptor
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "saccade-pixels" not in Path("/proc/self/maps").read_text()


def test_relevance_arrives_with_its_image_maps() -> None:
    front, engine = pair()
    maps = np.random.default_rng(0).random((5, 3, 4), dtype=np.float32)
    fine = np.random.default_rng(1).random((12, 16), dtype=np.float32)
    image_maps = ImageMaps(propositional=maps[0], perspectival=maps[1], lost=maps[2], fine=fine)
    looks = tuple(RelevanceMaps(image_maps=image_maps, participatory=one, strength=0.5) for one in maps[3:])
    assert looks[0].share.shape == image_maps.writing.shape  # what is made of them stays where it was made
    told = ZoomResult(regions=((), ()), gated=(None, None), more_tokens=0, visual_tokens=0, looks=looks)
    engine.send(StepOutputs((Delta(request_id="r", zoomed=told),), EngineStats()))
    (delta,) = front.receive(ToFrontend).deltas
    for ours, theirs in zip(looks, delta.zoomed.looks, strict=True):
        for name in ("propositional", "perspectival", "participatory", "lost"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        assert np.array_equal(theirs.image_maps.fine, fine)
        assert theirs.strength == 0.5
