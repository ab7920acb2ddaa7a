"""Pinned beginnings: whatever else needs their place, they stay; and no one is locked out by them."""

from random import Random
from typing import Any

import pytest

from saccade.engine.builder import validate_pinned_prefixes
from saccade.errors import ConfigError
from saccade.kv_cache.prefix_cache import PinnedPrefixes
from tests.scheduler.simulated_device import Engine, answer_alone, question, small_limits

SYSTEM = [2, 3, 4, 5, 6, 7, 8, 2, 4, 6]  # ten tokens: two blocks of four are full
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def fill(engine: Engine, name: str) -> None:
    """Something that takes every block there is, and ends."""
    left = engine.pool.num_available() * engine.limits.block_size
    draw = Random(name)
    prompt = [draw.randrange(2, 9) for _ in range(min(left - 4, engine.limits.max_model_len - 5))]
    engine.add(question(name, prompt, max_tokens=4, **ENDLESS))
    engine.run()


def ask(engine: Engine, name: str, *, salt: bytes = b"", words: int = 5) -> int:
    """Cached tokens of a question behind the system prompt; its answer must be right."""
    request = question(name, [*SYSTEM, *[3] * words], salt=salt, max_tokens=2, **ENDLESS)
    engine.add(request)
    engine.run()
    assert engine.tokens(name) == answer_alone(request, 0, engine.limits)
    return engine.cached(name)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pinned_prefix_is_never_evicted(overlap: bool) -> None:
    limits = small_limits(max_model_len=40)
    for pins, kept in ((PinnedPrefixes([SYSTEM], 2), 8), (None, 0)):
        engine = Engine(blocks=12, limits=limits, overlap=overlap, pins=pins)
        assert ask(engine, "first") == 0
        for number in range(4):
            fill(engine, f"f{number}")
        assert ask(engine, "again", words=3) == kept
        assert engine.scheduler.stats().blocks_pinned == (2 if pins else 0)
        assert engine.scheduler.stats().blocks_used == 0


def test_every_tenant_has_its_own_as_far_as_there_is_room() -> None:
    engine = Engine(blocks=16, limits=small_limits(max_model_len=40), pins=PinnedPrefixes([SYSTEM], 5))
    for salt in (b"a", b"b", b"c"):
        ask(engine, f"first {salt!r}", salt=salt)
    for number in range(5):
        fill(engine, f"f{number}")
    stats = engine.scheduler.stats()
    assert (stats.blocks_pinned, stats.pin_refusals) == (4, 6)  # c's question, and the five others
    again = [ask(engine, f"again {salt!r}", salt=salt, words=3) for salt in (b"a", b"b", b"c")]
    assert again == [8, 8, 0]


def test_a_request_of_the_longest_context_still_gets_its_turn() -> None:
    limits = small_limits(max_model_len=40)
    engine = Engine(blocks=12, limits=limits, pins=PinnedPrefixes([SYSTEM], 12 - 10))
    ask(engine, "first")
    long = question("long", [5] * 20, max_tokens=20, **ENDLESS)
    engine.add(long)
    for number in range(3):
        engine.add(question(f"other {number}", [7] * 9, max_tokens=8, **ENDLESS))
    engine.run()
    assert engine.tokens("long") == answer_alone(long, 0, limits)


def test_two_beginnings_that_share_blocks_pin_those_once() -> None:
    pins = PinnedPrefixes([SYSTEM, [*SYSTEM, *SYSTEM]], 5)
    engine = Engine(blocks=20, pins=pins)
    engine.add(question("a", [*SYSTEM, *SYSTEM, 3], max_tokens=1))
    engine.run()
    assert engine.scheduler.stats().blocks_pinned == 5


def test_blocks_spared_by_sharing_are_counted_without_the_pins() -> None:
    engine = Engine(blocks=40, pins=PinnedPrefixes([SYSTEM], 5))
    ask(engine, "first")
    assert engine.scheduler.stats().blocks_spared == 0
    engine.add(question("n", [*SYSTEM, *[3] * 10], n=3, max_tokens=5, **ENDLESS))
    engine.step()
    engine.step()
    stats = engine.scheduler.stats()
    assert stats.blocks_spared == 2 * 5  # three hold the five blocks of the prompt
    engine.run()
    assert engine.scheduler.stats().blocks_spared == 0


def test_tenants_without_a_block_to_pin_are_not_remembered() -> None:
    pins = PinnedPrefixes([SYSTEM[:3]], 5)
    engine = Engine(blocks=20, pins=pins)
    for number in range(50):
        ask(engine, str(number), salt=b"%d" % number)
        assert len(pins._tenants) <= pins.capacity


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 15 tokens.* blocks of 16.* --block-size"):
        validate_pinned_prefixes([[1] * 40, [1] * 15], 16, 100, 200, 2)
    validate_pinned_prefixes([[1] * 40], 16, 100, 200, 2)
    with pytest.raises(ConfigError, match=r"40 tokens, 2 KV blocks of 100 bytes, together 200.* may pin 199"):
        validate_pinned_prefixes([[1] * 40], 16, 100, 199, 2)
    with pytest.raises(ConfigError, match=r"need 2 KV blocks.* room for 1"):
        validate_pinned_prefixes([[1] * 40], 16, 100, 200, 1)
