"""The CUDA graph cache: when a key is captured, what is evicted, when a failed capture is tried again."""

import logging
import random

import pytest

from saccade.kernels.cuda_graph import MAX_CANDIDATES, CudaGraphCache, PlainRecorder

ERROR = RuntimeError("operation not permitted when stream is capturing\nand more")


def make_cache(capacity: int = 2, **options: int) -> CudaGraphCache[int, str]:
    return CudaGraphCache("a step of", PlainRecorder(), capacity, **options)  # type: ignore[arg-type]


def test_a_key_is_due_from_its_nth_use_on_or_at_once_where_asked() -> None:
    cache = make_cache(min_uses=3)
    assert [cache.is_due(1) for _ in range(4)] == [False, False, True, True]
    assert cache.is_due(2, now=True)
    cache.put(1, "one")
    cache.check()
    assert cache.get(1) == "one"


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache = make_cache()
    for key in (1, 2):
        cache.put(key, str(key))
    assert cache.get(1) == "1"
    cache.put(3, "3")
    assert cache.keys == (1, 3)
    assert cache.get(2) is None
    cache.check()


def test_without_eviction_a_full_cache_captures_nothing_more() -> None:
    cache = CudaGraphCache[int, str]("a step of", PlainRecorder(), 1, evicts=False)
    assert cache.has_room()
    assert not cache.has_room(spare=1)
    cache.put(1, "1")
    assert not cache.is_due(2, now=True)
    assert cache.keys == (1,)


def test_a_failed_key_is_logged_once_and_tried_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(max_failures=2, retry_after=10)
    with caplog.at_level(logging.WARNING):
        cache.fail(1, ERROR)
        assert cache.has_failed(1)
        tries = 0
        for _ in range(100):
            cache.get(1)
            if cache.is_due(1):
                tries += 1
                cache.fail(1, ERROR)
    assert tries == 1
    assert caplog.text.count("a step of 1 cannot be captured (operation not permitted") == 1
    assert "and more" not in caplog.text


def test_an_entry_whose_capture_fails_leaves_the_cache() -> None:
    cache = make_cache()
    cache.put(1, "1")
    cache.fail(1, ERROR)
    assert cache.get(1) is None
    assert not cache.is_due(1)
    cache.check()


def test_the_bounds_hold_whatever_happens() -> None:
    rng, cache = random.Random(0), make_cache(capacity=5, min_uses=2, max_failures=2, retry_after=3)
    for _ in range(3 * MAX_CANDIDATES):
        key = rng.randrange(2 * MAX_CANDIDATES) if rng.random() < 0.9 else rng.randrange(8)
        if cache.get(key) is None and cache.is_due(key):
            if rng.random() < 0.3:
                cache.fail(key, ERROR)
            else:
                cache.put(key, str(key))
    cache.check()
    assert len(cache) == 5
