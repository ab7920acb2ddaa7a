"""Views spread over steps: while answers stream, an image is computed a few layers at a time."""

from typing import Any

from saccade.engine.cost_prior import H200, ModelSize, coefficients
from saccade.request import Request
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.policy import SchedulerConfig
from saccade.step_plan import EncodeTask, StepPlan
from saccade.tools.planner.simulator import SimulatedMachine, Simulator, work_of
from saccade.tools.planner.traffic import Arrival, TrafficKind, VisionSizes, arrivals
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits
from tests.scheduler.simulated_device import work_of as work_on_device

ENDLESS: dict[str, Any] = {"stop_token_ids": ()}
LAYERS = 8
QWEN3_VL_8B = ModelSize(36, 32, 8, 128, 4096, 151_936, 7_568_000_000, 2, 27, 1152, 425_000_000)


def streaming(target: float = 3.0, **options: Any) -> Engine:
    """An engine with one endless answer, in which an image of 64 patches takes 9 ms and the target 3."""
    limits = small_limits(
        **{
            "max_model_len": 2000,
            "max_step_tokens": 64,
            "itl_target": target,
            "encode_layers": LAYERS,
            "max_num_seqs": 8,
            "min_encode_time": 0.0,
            **options.pop("limits", {}),
        }
    )
    engine = Engine(blocks=600, limits=limits, **options)
    engine.add(question("stream", [2], max_tokens=1500, **ENDLESS))
    engine.step()
    engine.step()
    return engine


def look(name: str, shown: int, prompt: tuple[int, ...] = (), **options: Any) -> Request:
    """A question about an image of 4 x 4 tokens, behind some text."""
    media = (image(shown, len(prompt), 4, 4),)
    return question(name, [*prompt, IMAGE_ID, 3], media, **{"max_tokens": 2, **ENDLESS, **options})


def slices(engine: Engine) -> list[tuple[int, int | None]]:
    return [(encode.first_layer, encode.stop_layer) for plan in engine.plans for encode in plan.encodes]


def until_done(engine: Engine, *names: str) -> None:
    engine.run(until=lambda: all(engine.finish(name) for name in names))
    for name in names:
        assert engine.finish(name) == "length"


def test_beside_a_stream_a_view_is_spread_over_steps_that_keep_the_target() -> None:
    engine = streaming()
    request = look("seen", 1)
    engine.add(request)
    until_done(engine, "seen")
    cut = slices(engine)
    assert len(cut) >= 3
    assert [first for first, _ in cut] == [0, *[stop for _, stop in cut[:-1]]]
    assert cut[-1][1] is None
    assert engine.tokens("seen") == answer_alone(request, 0, engine.limits)
    for plan in engine.plans:
        streams = any(row.output_position for row in plan.scheduled)
        if streams and plan.encodes and plan.encodes[0].stop_layer is not None:
            assert engine.truth.predict(work_on_device(plan, LAYERS)) <= 3.0
    stats = engine.scheduler.stats()
    assert (stats.encodes, stats.encode_slices) == (1, len(cut))


def test_without_streams_a_view_is_encoded_in_one_step() -> None:
    limits = small_limits(itl_target=3.0, encode_layers=LAYERS, max_model_len=100)
    engine = Engine(limits=limits)
    engine.add(look("seen", 1))
    engine.run()
    assert slices(engine) == [(0, None)]
    assert engine.scheduler.stats().encode_slices == 0


def test_the_rest_of_a_view_goes_at_once_when_the_last_stream_has_ended() -> None:
    engine = streaming()
    engine.add(look("seen", 1))
    engine.step()
    engine.cancel("stream")
    engine.step()
    cut = slices(engine)
    assert len(cut) == 2
    assert cut[1] == (cut[0][1], None)


def test_under_a_hopeless_target_a_view_still_gets_a_layer_each_step() -> None:
    engine = streaming(target=0.001)
    engine.now += 100  # the newcomer has patience of its own; the clock says it has waited
    engine.add(look("seen", 1))
    engine.now += 100
    until_done(engine, "seen")
    assert slices(engine) == [(i, i + 1) for i in range(LAYERS - 1)] + [(LAYERS - 1, None)]


def test_slices_end_where_a_captured_stretch_of_layers_ends() -> None:
    engine = streaming(target=5.0, limits={"encode_unit": 3})
    engine.add(look("seen", 1))
    until_done(engine, "seen")
    assert len(slices(engine)) > 1
    assert all(stop is None or stop % 3 == 0 for _, stop in slices(engine))


def test_a_view_needed_by_two_requests_is_encoded_once() -> None:
    engine = streaming()
    for number in range(3):
        engine.add(look(f"seen{number}", 1, prompt=(4,) * (number + 1)))
    until_done(engine, "seen0", "seen1", "seen2")
    assert engine.device.encoded == [image(1, 0, 4, 4).view.key]
    assert sum(stop is None for _, stop in slices(engine)) == 1
    assert engine.scheduler.stats().encode_slices > 2


def test_a_partial_view_stays_for_other_requests_when_the_first_is_cancelled() -> None:
    engine = streaming()
    engine.add(look("first", 1))
    engine.add(look("second", 1, prompt=(5, 6)))
    engine.step()
    assert len(engine.unfinished) == 1
    engine.cancel("first")
    assert len(engine.unfinished) == 1
    until_done(engine, "second")
    cut = slices(engine)
    assert [first for first, _ in cut] == [0, *[stop for _, stop in cut[:-1]]]  # never begun again


def test_a_partial_view_that_no_request_needs_is_freed_at_once() -> None:
    engine = streaming()
    engine.add(look("first", 1))
    engine.step()
    assert len(engine.unfinished) == 1
    engine.cancel("first")
    assert len(engine.unfinished) == 0


def test_a_request_beyond_the_view_does_not_keep_it_partly_encoded() -> None:
    engine = streaming(feature_bytes=0, prefix_caching=False)
    engine.add(look("past", 1, max_tokens=1000))
    engine.run(until=lambda: len(engine.tokens("past")) > 1)
    engine.add(look("late", 1, prompt=(7,)))
    engine.step()
    assert len(engine.unfinished) == 1
    engine.cancel("late")
    assert len(engine.unfinished) == 0


def test_a_failed_slice_ends_the_requests_that_need_it_and_leaves_nothing() -> None:
    engine = streaming(overlap=True)
    engine.add(look("first", 1))
    engine.add(look("second", 1, prompt=(5, 6)))
    engine.add(question("bystander", [9 % 8], max_tokens=1))
    engine.step()
    engine.fail()
    assert engine.finish("first") == engine.finish("second") == "error"
    assert len(engine.unfinished) == 0
    engine.run()
    assert not engine.unfinished.finishing


def test_a_partial_view_survives_preemption_of_its_sequence() -> None:
    """A stream grows into the blocks of the image's request, which goes back to the queue half seen."""
    limits = small_limits(
        itl_target=0.001, min_encode_time=0.0, encode_layers=40, patience=0.0, max_step_tokens=64
    )
    engine = Engine(blocks=12, limits=limits, prefix_caching=False)
    engine.add(question("stream", [2], max_tokens=40, **ENDLESS))
    engine.step()
    engine.add(look("seen", 1, prompt=(4, 5, 6, 7)))
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    (key,) = engine.unfinished.keys
    assert 5 < engine.unfinished.layers(key) < 40
    until_done(engine, "seen")
    assert [first for first, _ in slices(engine)].count(0) == 1


def test_room_for_another_view_is_made_by_giving_up_the_one_left_lying_longest() -> None:
    engine = streaming(limits={"max_encode_patches": 130, "patience": 1.0})
    engine.add(look("a", 1, priority=3))
    engine.step()
    engine.now += 0.01
    engine.add(look("b", 2, priority=2))
    engine.step()
    assert len(engine.unfinished) == 2
    engine.add(look("c", 3, priority=1))
    engine.step()
    a = image(1, 0, 4, 4).view.key
    assert a not in engine.unfinished.keys
    assert len(engine.unfinished) == 2
    until_done(engine, "a", "b", "c")


# At the sizes of Qwen3-VL-8B on an H200, by its ceilings


def chip(**changes: Any) -> tuple[Simulator, SimulatedMachine]:
    numbers: dict[str, Any] = {"max_num_seqs": 256, "max_step_tokens": 8192, "max_model_len": 32_768}
    limits = SchedulerConfig(
        block_size=16,
        max_encode_patches=32_768,
        max_queue=1 << 20,
        itl_target=20.0,
        encode_layers=27,
        encode_unit=3,
        **{**numbers, **changes},
    )
    costs = coefficients(QWEN3_VL_8B, H200)
    truth, believed = CostModel(costs, learning=False), CostModel(costs)
    machine = SimulatedMachine(limits, 48_000, 2 << 30, 32_768, truth, believed)
    return Simulator(machine), machine


def test_an_image_of_1024_beside_streams_is_cut_into_steps_of_20_ms() -> None:
    """The tower's 11 ms and the prompt's 1,088 tokens, 25 ms: neither view nor prompt fits one step whole."""
    player, machine = chip()
    plans: list[StepPlan] = []
    original = player.scheduler.plan

    def plan() -> StepPlan | None:
        made = original()
        if made is not None:
            plans.append(made)
        return made

    player.scheduler.plan = plan  # type: ignore[method-assign]
    text = TrafficKind(name="text", rate=1000, prompt=130, output=400)
    image = TrafficKind(name="image", rate=1000, prompt=64, output=8, image=(1024, 1024))
    streams = list(arrivals([text], VisionSizes(), 0, seconds=None, requests=100))
    images = [
        Arrival(1.5, image, made.request)
        for made in arrivals([image], VisionSizes(), 1, seconds=None, requests=300)
        if int(made.request.id) >= 297
    ]
    outcome = player.run([*streams, *images])
    beside = [step for step in plans if step.encodes]
    assert any(encode.stop_layer is not None for step in beside for encode in step.encodes)
    chunks = [row.num_tokens for step in plans for row in step.scheduled if row.spans]
    assert len(chunks) > 3
    assert max(chunks) < 1024
    for step in plans:
        if any(row.output_position for row in step.scheduled):
            assert machine.truth.predict(work_of(step, 27)) < 20.5  # the least chunk may come on top
    assert len(outcome.kinds["image"].whole) == 3
    assert max(outcome.kinds["text"].between) < 0.0205


def test_a_view_of_4096_never_takes_more_than_a_layer_beyond_the_target() -> None:
    player, _ = chip(max_model_len=40_000)
    text = TrafficKind(name="text", rate=1000, prompt=130, output=2000)
    image = TrafficKind(name="image", rate=1000, prompt=64, output=8, image=(4096, 4096))
    streams = list(arrivals([text], VisionSizes(), 0, seconds=None, requests=4))
    (asked,) = arrivals([image], VisionSizes(), 1, seconds=None, requests=1)
    request = Arrival(0.5, image, asked.request.__class__(**{**_fields(asked.request), "id": "huge"}))
    outcome = player.run([*streams, request])
    layer = 65_536 * 2 * 425e6 / 27 / 644e12 + 65_536**2 * 4 * 1152 / 360e12
    assert max(outcome.kinds["text"].between) < 0.0205 + layer
    assert outcome.stats.encode_slices == 27
    assert len(outcome.kinds["image"].whole) == 1
    player.scheduler.check()


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def test_a_share_of_a_view_counts_by_its_layers() -> None:
    encode = EncodeTask(image(1, 0).view, b"k", image(1, 0).pixels, 3, 9)
    assert encode.share(12) == 0.5
    assert EncodeTask(encode.view, b"k", encode.pixels, 3).share(12) == 0.75


def test_a_view_a_request_has_got_since_it_came_is_kept_for_it() -> None:
    engine = streaming()
    engine.add(look("seen", 1))
    making = engine.scheduler._kv.encoder
    making.remove(engine.scheduler._requests["seen"])  # as if it had come without the view
    making.add(engine.scheduler._requests["seen"])  # and a host decision had added it
    until_done(engine, "seen")
    assert [first for first, _ in slices(engine)].count(0) == 1
