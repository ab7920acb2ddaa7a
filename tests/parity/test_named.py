"""An image named instead of sent gets the tokens transformers gives to the image."""

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade import SamplingParams
from saccade.config import VisionCache
from saccade.errors import ImageNotFound
from saccade.request import Request
from tests.parity.test_engine import IMAGE, LONG, PICTURES, Bench, Question, bench, run

__all__ = ["bench"]


def by_name(peers: Bench, question: Question, name: str) -> Request:
    """The same request with hashes in the place of images, made by the front."""
    references = [media.name for media in peers.request(question).media]
    parts = [{"type": "image_ref", "image_ref": {"hash": reference}} for reference in references]
    params = SamplingParams(max_tokens=question.max_tokens, temperature=0)
    whole = peers.request(question)
    named = peers.front.prepare_chat([{"role": "user", "content": parts}], params, name)
    media = [
        type(one)(given.placeholder, one.view, one.pixels, name=one.name, without_pixels=one.without_pixels)
        for one, given in zip(named.media, whole.media, strict=True)
    ]
    assert all(one.without_pixels and not one.pixels.size for one in media)
    return Request(id=name, prompt=whole.prompt, media=tuple(media), sampling=whole.sampling)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("caching", [False, True], ids=["features", "and prefixes"])
def test_named_images_equal_transformers(bench: Callable[[str], Bench], overlap: bool, caching: bool) -> None:
    peers = bench("qwen3_vl")
    engine = peers.engine(prefix_caching=caching, overlap=overlap, max_num_batched_tokens=33)
    peers.check(engine, PICTURES[:6])
    encodes = engine.stats().encodes
    requests = [by_name(peers, question, f"named {place}") for place, question in enumerate(PICTURES[:6])]
    answers = run(engine, requests)
    for question, request in zip(PICTURES, requests, strict=False):
        assert answers[request.id, 0] == peers.expected(question)
    assert engine.stats().encodes == encodes


def test_named_images_are_answered_from_disk_after_a_restart_until_deleted(
    bench: Callable[[str], Bench], tmp_path: Path
) -> None:
    peers = bench("qwen3_vl")
    tiers = VisionCache(disk=1 << 30, dir=str(tmp_path))
    first = peers.engine(vision_cache=tiers)
    peers.check(first, PICTURES[:2])
    first.close()
    engine = peers.engine(vision_cache=tiers)
    request = by_name(peers, PICTURES[0], "named")
    assert run(engine, [request])["named", 0] == peers.expected(PICTURES[0])
    assert engine.stats().encodes == 0
    content = request.media[0].view.content
    assert engine.image_tiers(content)["disk"] == 1
    engine.delete_image(content)
    assert engine.image_tiers(content) == {"gpu": 0, "host": 0, "disk": 0}
    with pytest.raises(ImageNotFound):
        engine.submit(by_name(peers, PICTURES[0], "gone"))
    peers.check(engine, PICTURES[:2])  # with its bytes it is encoded again, and the other one still known
    assert engine.stats().encodes == 1
    engine.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("begun", [False, True], ids=["queued", "half made"])
def test_an_image_deleted_before_it_is_encoded_is_not_kept(
    bench: Callable[[str], Bench], begun: bool, overlap: bool
) -> None:
    """Though the request that brought it is answered, and one that brings it later keeps it again."""
    peers = bench("qwen3_vl")
    engine = peers.engine(itl_target=0.001, overlap=overlap)
    engine.submit(peers.request(LONG))
    while not engine.step():
        pass
    request = peers.request(PICTURES[0])
    engine.submit(request)
    while begun and not engine.stats().encode_slices:
        engine.step()
    content = request.media[0].view.content
    engine.delete_image(content)
    assert run(engine, [])[request.id, 0] == peers.expected(PICTURES[0])
    assert engine.image_tiers(content) == {"gpu": 0, "host": 0, "disk": 0}
    with pytest.raises(ImageNotFound):
        engine.submit(by_name(peers, PICTURES[0], "gone"))
    peers.check(engine, PICTURES[:1])
    assert engine.image_tiers(content)["gpu"] == 1


def test_a_deleted_image_leaves_no_kv_to_find(bench: Callable[[str], Bench]) -> None:
    peers = bench("qwen3_vl")
    engine = peers.engine(block_size=4)
    peers.check(engine, PICTURES[:1])
    engine.delete_image(peers.request(PICTURES[0]).media[0].view.content)
    before = engine.stats()
    peers.check(engine, PICTURES[:1])
    after = engine.stats()
    assert after.encodes == before.encodes + 1
    assert after.prefix_hit_tokens - before.prefix_hit_tokens < 4  # what stands before the image
    assert IMAGE in PICTURES[0].text
