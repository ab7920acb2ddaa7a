"""Pictures by name, and features on disk: answered from what is kept, or ended in words; never stuck."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.encoder.cache import disk as fetches
from saccade.errors import ImageNotFound
from saccade.request import NO_PIXELS, Media, Request
from tests.encoder.cache.test_store import SlowDisk
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits

TEXT = [2, 3, 4, 5]


def shown(name: int, slot: int = 0) -> Media:
    media = image(name, slot)
    return msgspec.structs.replace(media, name=f"picture {name}")


def absent(media: Media) -> Media:
    return msgspec.structs.replace(media, pixels=NO_PIXELS, without_pixels=True)


def ask(name: str, media: Media, text: list[int] = TEXT, **more: Any) -> Request:
    return question(name, [IMAGE_ID, *text], (media,), **{"max_tokens": 4, "stop_token_ids": (), **more})


def by_name(request: Request) -> Request:
    return msgspec.structs.replace(request, media=tuple(map(absent, request.media)))


def answered(engine: Engine, request: Request) -> None:
    """As if its pixels had come with it."""
    media = tuple(image(int(media.view.content[0]), media.placeholder) for media in request.media)
    given_all = msgspec.structs.replace(request, media=media)
    assert engine.tokens(request.id) == answer_alone(given_all, 0, engine.limits)


def the_error(engine: Engine, name: str) -> str | None:
    (last,) = [delta for delta in engine.deltas[name] if delta.finish]
    assert last.finish == "error"
    return last.code


@pytest.mark.parametrize("overlap", [False, True])
def test_a_named_image_is_answered_from_its_features(overlap: bool) -> None:
    engine = Engine(overlap=overlap, prefix_caching=False)
    engine.add(ask("first", shown(7)))
    engine.run()
    assert [delta.kept for delta in engine.deltas["first"] if delta.kept] == [(0,)]
    engine.add(by_name(ask("again", shown(7), [6, 6])))
    engine.run()
    answered(engine, by_name(ask("again", shown(7), [6, 6])))
    assert engine.scheduler.stats().encodes == 1


def test_an_image_never_seen_is_refused_and_nothing_is_left_of_the_request() -> None:
    engine = Engine()
    with pytest.raises(ImageNotFound, match=r"picture 7.*bytes") as refusal:
        engine.add(by_name(ask("q", shown(7))))
    assert refusal.value.code == "image_not_found"
    assert refusal.value.status == 404
    engine.scheduler.check()
    assert engine.scheduler.idle


def test_an_image_whose_features_are_gone_is_answered_where_its_kv_covers_it() -> None:
    engine = Engine(feature_bytes=0, limits=small_limits(block_size=2))
    engine.add(ask("first", shown(7)))
    engine.run()
    assert not any(delta.kept for delta in engine.deltas["first"])  # no one is told to name it
    engine.add(by_name(ask("again", shown(7), [*TEXT, 6])))
    engine.run()
    answered(engine, by_name(ask("again", shown(7), [*TEXT, 6])))
    other = question("elsewhere", [5, IMAGE_ID, 6], (absent(shown(7, 1)),), max_tokens=2)
    with pytest.raises(ImageNotFound):  # behind other text its KV is of no use
        engine.add(other)


def test_kv_evicted_before_the_request_starts_ends_it_with_an_actionable_error() -> None:
    engine = Engine(feature_bytes=0, blocks=12, limits=small_limits(block_size=2, max_num_seqs=1))
    engine.add(ask("first", shown(7), max_tokens=1))
    engine.run()
    engine.add(question("large", [2] * 18, max_tokens=4, stop_token_ids=()))
    engine.step()  # it has the only row, and takes the blocks
    engine.add(by_name(ask("again", shown(7), [*TEXT, 6], max_tokens=1)))
    engine.run()
    assert the_error(engine, "again") == "image_not_found"
    assert engine.scheduler.stats().blocks_used == 0


def test_features_a_request_relies_on_stay_however_many_others_come_and_go() -> None:
    engine = Engine(
        feature_bytes=40, prefix_caching=False, limits=small_limits(max_num_seqs=1, max_model_len=60)
    )
    engine.add(ask("first", shown(7), max_tokens=1))
    engine.run()
    engine.add(question("running", TEXT, max_tokens=30, stop_token_ids=()))
    engine.step()
    waiting = by_name(ask("waiting", shown(7), [6]))
    engine.add(waiting)
    for number in range(20, 24):
        engine.add(ask(f"other {number}", shown(number), max_tokens=1, priority=-5))
    engine.run()
    answered(engine, waiting)
    assert engine.store.stats.host.bytes == 0  # released


def test_a_preempted_request_goes_on_though_it_came_without_pixels() -> None:
    engine = Engine(feature_bytes=40, blocks=8, prefix_caching=False, limits=small_limits(max_model_len=32))
    first = ask("first", shown(7), max_tokens=12)
    engine.add(first)
    engine.step()
    second = ask("second", shown(8), max_tokens=12)
    engine.store.put(second.media[0].view.key, 8, 40)
    engine.add(by_name(second))
    engine.store.put(b"another", 9, 40)
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    answered(engine, first)
    answered(engine, by_name(second))


def test_an_image_given_and_named_in_one_request_needs_no_features() -> None:
    engine = Engine(feature_bytes=0, prefix_caching=False)
    both = question("both", [IMAGE_ID, 5, IMAGE_ID, 6], (shown(7), absent(shown(7, 2))), max_tokens=3)
    engine.add(both)
    engine.run()
    answered(engine, both)


def test_deleting_hides_features_and_kv() -> None:
    engine = Engine(limits=small_limits(block_size=2))
    engine.add(ask("first", shown(7)))
    engine.run()
    engine.scheduler.delete_image(shown(7).view.content)
    engine.scheduler.check()
    with pytest.raises(ImageNotFound):
        engine.add(by_name(ask("named", shown(7))))
    engine.add(ask("again", shown(7)))
    engine.run()
    assert engine.cached("again") == 0
    assert engine.scheduler.stats().encodes == 2
    engine.add(ask("third", shown(7)))  # the new edition is found
    engine.run()
    assert engine.cached("third") > 0


def test_deleting_in_the_middle_of_an_answer_changes_no_token_and_leaves_nothing() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=2))
    request = ask("q", shown(7), max_tokens=8)
    engine.add(request)
    for _ in range(3):
        engine.step()
        engine.scheduler.delete_image(shown(7).view.content)
        engine.scheduler.check()
    engine.run()
    answered(engine, request)
    assert not engine.store.contains(shown(7).view.key)


def disk_with(*names: int) -> SlowDisk:
    disk = SlowDisk(size=40)
    for name in names:
        media = shown(name)
        disk.files[media.view.key] = media.view.content, name  # type: ignore[assignment]
    return disk


def test_a_request_waits_for_its_file_while_others_pass_and_nothing_is_encoded() -> None:
    disk = disk_with(7)
    engine = Engine(disk=disk, prefix_caching=False)
    engine.add(ask("seen before", shown(7)))
    engine.add(question("text", TEXT, max_tokens=3, stop_token_ids=()))
    engine.step()
    engine.step()
    assert engine.tokens("text")
    assert not engine.tokens("seen before")
    disk.finish()
    engine.run()
    answered(engine, ask("seen before", shown(7)))
    assert engine.scheduler.stats().encodes == 0
    assert engine.scheduler.stats().features.disk.hits == 1


def test_a_late_or_damaged_file_is_encoded_again_or_ends_a_request_without_pixels() -> None:
    disk = disk_with(7, 8, 9)
    engine = Engine(disk=disk, prefix_caching=False)
    engine.add(ask("late", shown(7)))
    engine.add(ask("damaged", shown(8)))
    engine.add(by_name(ask("named", shown(9))))
    disk.damaged |= {shown(8).view.key, shown(9).view.key}
    disk.finish(shown(8).view.key)
    while engine.now < fetches.READ_SECONDS + 1:
        engine.step()
    answered(engine, ask("late", shown(7)))
    answered(engine, ask("damaged", shown(8)))
    assert not engine.deltas["named"]  # there is nothing for it but to wait
    disk.finish()
    engine.run()
    assert the_error(engine, "named") == "image_not_found"
    assert engine.scheduler.stats().encodes == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), host=st.sampled_from([0, 80]), gpu=st.sampled_from([0, 80]), caching=st.booleans())
def test_random_names_files_and_deletions_are_answered_or_ended_and_all_is_freed(
    data: st.DataObject, host: int, gpu: int, caching: bool
) -> None:
    disk = disk_with(3)
    engine = Engine(
        disk=disk, feature_bytes=gpu, host_bytes=host, blocks=24, prefix_caching=caching, overlap=host > 0
    )
    requests: list[Request] = []
    for number in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.integers(1, 4))
        request = ask(
            f"q{number}", shown(name), data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=6))
        )
        request = by_name(request) if data.draw(st.booleans()) else request
        try:
            engine.add(request)
            requests.append(request)
        except ImageNotFound:
            engine.scheduler.check()
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
        match data.draw(st.sampled_from(["go on", "land", "damage", "lose", "delete"])):
            case "land":
                disk.finish()
            case "damage":
                disk.damaged.add(shown(name).view.key)
            case "lose":
                disk.files.pop(shown(name).view.key, None)
            case "delete":
                engine.scheduler.delete_image(shown(name).view.content)
                engine.scheduler.check()
    disk.finish()
    for _ in range(400):
        if engine.scheduler.idle:
            break
        engine.step()
        disk.finish()
    assert engine.scheduler.idle
    for request in requests:
        if engine.finish(request.id) == "error":
            assert request.media[0].without_pixels
            assert the_error(engine, request.id) == "image_not_found"
        else:
            answered(engine, request)
    assert not engine.store.pins
    assert not engine.store.holds
    assert engine.store.stats.gpu.bytes <= gpu
    assert engine.scheduler.stats().blocks_used == 0
