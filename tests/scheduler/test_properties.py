"""Whatever arrives, in whatever order, under whatever limits: everyone gets what they would get alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import RequestError
from saccade.kv_cache.pool_sizing import VISION_SCOPES
from saccade.request import Media, Request
from saccade.scheduler.policy import EarlyExit, SchedulerConfig
from saccade.scheduler.step_planner import Drafter
from tests.scheduler.simulated_device import (
    IMAGE_ID,
    Engine,
    answer_alone,
    choose_among,
    image,
    question,
    zooming,
)

Action = tuple[str, object]


@dataclass(frozen=True)
class World:
    limits: SchedulerConfig
    blocks: int
    feature_bytes: int
    overlap: bool
    prefix_caching: bool
    vision: float = 0.0  # share of the blocks that is the vision pool
    scope: str = "all"
    slots: int = 0
    outcomes: int = 1009  # of looking at an image
    early_relevance: bool = False

    def engine(self, drafter: Drafter | None = None) -> Engine:
        return Engine(
            drafter=drafter,
            chooser=choose_among(self.outcomes),
            early_relevance=self.early_relevance,
            vision=int(self.blocks * self.vision),
            roles=VISION_SCOPES[self.scope],
            overlap=self.overlap,
            prefix_caching=self.prefix_caching,
            blocks=self.blocks,
            feature_bytes=self.feature_bytes,
            limits=self.limits,
            slots=self.slots,
        )


worlds = st.builds(
    World,
    limits=st.builds(
        SchedulerConfig,
        max_num_seqs=st.integers(1, 6),
        max_step_tokens=st.sampled_from([1, 2, 7, 7, 16, 40]),
        max_model_len=st.sampled_from([24, 40]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        max_encode_patches=st.sampled_from([1, 16, 40]),
        max_queue=st.sampled_from([3, 100]),
        seed=st.just(5),
        itl_target=st.sampled_from([None, 0.001, 3.0, 6.0, 1000.0]),
        stream_tokens=st.sampled_from([1, 5, 1000]),
        stretch=st.sampled_from([1.0, 3.0]),
        min_chunk=st.sampled_from([1, 3, 32]),
        patience=st.sampled_from([0.0, 0.3, 5.0]),
        encode_share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        class_slots=st.sampled_from([0.3, 0.75, 1.0]),
        encode_layers=st.sampled_from([1, 3, 8]),
        encode_unit=st.sampled_from([1, 1, 2]),
        min_encode_time=st.sampled_from([0.0, 0.1, 1.0]),
        wait_tokens=st.sampled_from([1, 4, 128]),
        early_exit=st.builds(EarlyExit, st.sampled_from([0, 2, 8, 40])),
    ),
    blocks=st.integers(4, 30),
    feature_bytes=st.sampled_from([0, 50, 10_000]),
    overlap=st.booleans(),
    prefix_caching=st.sampled_from([True, True, False]),
    vision=st.sampled_from([0.0, 0.0, 0.3, 0.5, 0.8]),
    scope=st.sampled_from(["all", "all", "global"]),
    slots=st.sampled_from([0, 3, 8, 40]),
    outcomes=st.sampled_from([1, 2, 5, 1009]),
    early_relevance=st.booleans(),
)

# Prompts are beginnings of few texts, so that they share prefixes; pieces are texts and images.
text = st.builds(
    lambda kind, length: [2 + (kind * 7 + i) % 6 for i in range(length)], st.integers(0, 1), st.integers(0, 9)
)
look = st.tuples(
    st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (2, 3), (3, 3)]), st.sampled_from([None, (4, 4)])
)


@st.composite
def requests(draw: st.DrawFn) -> Callable[[str], Request]:
    prompt: list[int] = []
    images: list[Media] = []
    for piece in draw(st.lists(st.one_of(text, look), min_size=1, max_size=4)):
        if isinstance(piece, list):
            prompt += piece
        else:
            name, (rows, columns), frame = piece
            images.append(image(name, len(prompt), rows, columns, frame))
            prompt.append(IMAGE_ID)
    sampling = {
        "max_tokens": draw(st.integers(1, 14)),
        "min_tokens": draw(st.integers(0, 6)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "seed": draw(st.sampled_from([None, 0, 1])),
        "stop_token_ids": draw(st.sampled_from([(), (1,), (1, 2)])),
    }
    zoom = None
    if images and draw(st.sampled_from([True, True, False])):
        tail = draw(st.integers(0, 3))
        prompt += [7] * tail
        at = len(prompt) - tail
        slots = tuple(one.placeholder for one in images if draw(st.booleans()))
        tokens = draw(st.sampled_from([0, 1, 2, 4, 4, 4, 6]))
        zoom = zooming(at, slots, tokens, tuple(images)) if slots else None
    registered = draw(st.booleans())
    salt = draw(st.sampled_from([b"", b"", b"other"]))
    priority = draw(st.sampled_from([0, 0, 0, -1, 1, 50]))
    return lambda name: question(
        name,
        prompt or [2],
        tuple(images),
        salt=salt,
        priority=priority,
        zooming=zoom,
        registered=registered,
        **sampling,
    )


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("spoil"), st.integers(0, 5)),
        st.tuples(st.just("give way"), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=30,
)


def _ask(kind: int, length: int, tail: int, most: int, n: int) -> Callable[[str], Request]:
    one = image(kind, 0)
    prompt = [IMAGE_ID, *[2 + (kind + i) % 6 for i in range(length)]]
    zoom = zooming(len(prompt), (0,), 4, (one,))
    return lambda name: question(name, prompt + [7] * tail, (one,), max_tokens=most, n=n, zooming=zoom)


# Questions of few kinds about two images, in worlds that hold what is chosen.
asks = st.builds(
    _ask,
    st.integers(1, 2),
    st.integers(0, 5),
    st.sampled_from([0, 2]),
    st.sampled_from([1, 5, 14]),
    st.sampled_from([1, 1, 1, 2]),
)
curious = st.lists(
    st.one_of(
        st.tuples(st.just("add"), asks),
        st.tuples(st.just("add"), asks),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("give way"), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.integers(1, 2)),
    ),
    min_size=4,
    max_size=30,
)
roomy_worlds = worlds.map(
    lambda world: replace(
        world,
        limits=replace(world.limits, max_step_tokens=40, max_model_len=40),
        blocks=world.blocks + 10,
        feature_bytes=10_000,
    )
)


def play(engine: Engine, script: list[Action]) -> dict[str, Request]:
    """Gives the requests that were accepted."""
    accepted: dict[str, Request] = {}
    for action, detail in script:
        if action == "add" and callable(detail):
            request = detail(f"r{len(accepted)}")
            try:
                engine.add(request)
            except RequestError:
                engine.scheduler.check()
            else:
                accepted[request.id] = request
        elif action == "step" and isinstance(detail, int):
            for _ in range(detail):
                engine.step()
        elif action == "cancel" and isinstance(detail, int):
            engine.cancel(f"r{len(accepted) - 1 - detail}")
        elif action == "fail":
            engine.fail()
        elif action == "give way" and isinstance(detail, int):
            preempt(engine, detail)
        elif action == "delete" and isinstance(detail, int):
            engine.scheduler.delete_image(image(detail, 0).view.content)
            engine.scheduler.check()
        elif action == "spoil" and isinstance(detail, int):
            slices = iter([False] * detail + [True])  # a slice soon to come fails
            engine.device.fails = lambda encode, slices=slices: next(slices, False)  # type: ignore[misc]
    return accepted


def preempt(engine: Engine, place: int) -> None:
    """One of those that run, as if another needed its blocks."""
    running = list(engine.scheduler._queues.running)
    if running:
        engine.scheduler._planner.preempt(running[place % len(running)])
        engine.scheduler.check()


def most_steps(accepted: dict[str, Request], limits: SchedulerConfig) -> int:
    """Alone and one after the other, each token a step, and everything computed a few times over."""
    return 20 + sum(4 * request.sampling.n * limits.max_model_len for request in accepted.values())


def verify(engine: Engine, accepted: dict[str, Request]) -> None:
    """Every choice has ended with the tokens it would have had alone, and nothing is held any more."""
    for name, request in accepted.items():
        for index in range(request.sampling.n):
            alone = answer_alone(request, index, engine.limits, engine.pool.roles, engine.chooser)
            got = engine.tokens(name, index)
            finish = engine.finish(name, index)
            if finish in ("cancelled", "error"):
                assert got == alone[: len(got)]
            else:
                assert got == alone
                assert finish == ends_with(request, alone)
    assert engine.scheduler.idle
    assert engine.pool.used == 0
    assert not engine.store.pins
    stats = engine.scheduler.stats()
    assert (stats.swap_slots_used, stats.swap_waiting) == (0, 0)
    assert not engine.unfinished.keys
    assert not engine.unfinished.finishing


def ends_with(request: Request, output: list[int]) -> str:
    sampling = request.sampling
    stopped = output[-1] in sampling.stop_token_ids and len(output) >= sampling.min_tokens
    return "stop" if stopped else "length"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(world=worlds, script=actions)
def test_every_request_gets_the_tokens_it_would_get_alone(world: World, script: list[Action]) -> None:
    engine = world.engine()
    accepted = play(engine, script)
    engine.run(most_steps(accepted, world.limits))
    verify(engine, accepted)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(world=roomy_worlds, script=curious)
def test_every_request_with_zoomed_views_gets_the_tokens_it_would_get_alone(
    world: World, script: list[Action]
) -> None:
    engine = world.engine()
    accepted = play(engine, script)
    engine.run(most_steps(accepted, world.limits))
    verify(engine, accepted)


class KnowingDrafter:
    """Proposes up to three tokens: those of the true answer, some of them wrong."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.engine: Engine | None = None

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        assert self.engine is not None
        count = min(most, self._random.randrange(4))
        right = next(filter(None, map(partial(self._rest, tokens), self.engine.requests.values())), [])
        drafts = [*right, 2, 3, 4][:count]
        return tuple(2 if self._random.random() < 0.2 else draft for draft in drafts)

    def _rest(self, tokens: Sequence[int], request: Request) -> list[int]:
        """What follows `tokens` in the first answer of the request, if they begin it."""
        assert self.engine is not None
        prompt = lay_out_prompt(request).tokens
        if request.zooming is not None or tuple(tokens[: len(prompt)]) != prompt:
            return []
        answer = answer_alone(request, 0, self.engine.limits, self.engine.pool.roles)
        output = list(tokens[len(prompt) :])
        return answer[len(output) :] if answer[: len(output)] == output else []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(world=worlds, script=actions, seed=st.integers(0, 99))
def test_verified_drafts_give_the_tokens_of_one_at_a_time(
    world: World, script: list[Action], seed: int
) -> None:
    drafter, draw = KnowingDrafter(seed), Random(seed)
    engine = drafter.engine = world.engine(drafter)
    engine.device.declines = lambda: draw.random() < 0.2
    accepted = play(engine, script)
    engine.run(most_steps(accepted, world.limits))
    verify(engine, accepted)


def test_accepted_drafts_save_steps() -> None:
    request = question("a", [5, 6, 7], max_tokens=30, stop_token_ids=())
    drafter = KnowingDrafter(1)
    engine = drafter.engine = Engine(drafter=drafter)
    engine.add(request)
    engine.run()
    assert engine.tokens("a") == answer_alone(request, 0, engine.limits)
    assert engine.device.accepted > 5
    assert len(engine.plans) < 30 - engine.device.accepted // 2


def test_a_stop_token_inside_an_accepted_run_ends_the_sequence_there() -> None:
    for name in map(str, range(40)):
        request = question(name, [5, 6, 7], max_tokens=30)
        drafter = KnowingDrafter(2)
        engine = drafter.engine = Engine(drafter=drafter)
        engine.add(request)
        engine.run()
        verify(engine, {name: request})


def crowd(
    seed: int, *, overlap: bool, prefix_caching: bool, pools: bool = False, luck: float = 1.0
) -> tuple[Engine, dict[str, Request]]:
    """Forty requests about three images, some cancelled, in a pool that holds a few of them at a time.
    `luck`: how often a view, or a slice of one, can be made."""
    draw = Random(seed)
    limits = SchedulerConfig(
        max_num_seqs=draw.choice([3, 5, 8]),
        max_step_tokens=draw.choice([7, 7, 20]),
        max_model_len=48,
        block_size=draw.choice([2, 4]),
        max_encode_patches=draw.choice([1, 16, 40]),
        max_queue=100,
        itl_target=draw.choice([None, None, 4.0]),
        stretch=(1.0, 1.0, 3.0)[seed % 3],
        patience=draw.choice([0.1, 1.0]),
        encode_layers=draw.choice([1, 6]),
    )
    blocks = 48 // limits.block_size + draw.randrange(12)
    world = World(
        limits, blocks, draw.choice([0, 60, 1000]), overlap, prefix_caching, slots=(60, 0, 5)[seed % 3]
    )
    if pools:  # as many for text alone, and the views of the largest question beside them
        more = 12 // limits.block_size + draw.randrange(3)
        world = replace(world, blocks=blocks + more, vision=(more + 0.5) / (blocks + more))
    engine = world.engine()
    fate = Random(seed)
    engine.device.fails = lambda encode: fate.random() > luck
    accepted: dict[str, Request] = {}
    for number in range(40):
        prompt, images = [2, 3, 4, 5, 6, 7][: draw.randrange(7)], []
        for _ in range(draw.randrange(3)):
            images.append(image(draw.randrange(3), len(prompt), 2, draw.choice([2, 3])))
            prompt += [IMAGE_ID, *[2, 4, 6, 8][: draw.randrange(5)]]
        at, slots = len(prompt), tuple(one.placeholder for one in images if draw.random() < 0.7)
        zoom = zooming(at, slots, draw.randrange(7), tuple(images)) if slots else None
        request = question(
            f"r{number}",
            prompt or [3],
            tuple(images),
            salt=draw.choice([b"", b"", b"other"]),
            max_tokens=draw.randrange(1, 26),
            min_tokens=draw.randrange(22),
            n=draw.choice([1, 1, 1, 2, 4]),
            seed=draw.choice([None, 1]),
            priority=draw.choice([0, 0, -1, 2]),
            zooming=zoom,
        )
        engine.add(request)
        accepted[request.id] = request
        for _ in range(draw.choice([0, 0, 2, 9])):
            engine.step()
        if draw.random() < 0.2:
            engine.cancel(f"r{draw.randrange(number + 1)}")
    engine.run(most_steps(accepted, limits))
    return engine, accepted


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_in_a_small_pool_gets_what_each_would_get_alone(overlap: bool, prefix_caching: bool) -> None:
    steps = preemptions = hits = copies = slices = swaps = dropped = zooms = 0
    for seed in range(36):
        engine, accepted = crowd(seed, overlap=overlap, prefix_caching=prefix_caching)
        verify(engine, accepted)
        stats = engine.scheduler.stats()
        steps += stats.steps
        preemptions += stats.preemptions
        hits += stats.prefix_hit_tokens
        copies += sum(len(plan.block_copies) for plan in engine.plans)
        slices += engine.device.slices
        swaps += engine.device.swapped
        dropped += stats.swap_dropped
        assert engine.device.swapped == stats.swap_in_blocks
        zooms += stats.zooms
    # The crowd must have met what it is there to meet.
    assert steps > 5000
    assert preemptions > 80
    assert copies > 100
    assert slices > 50
    assert swaps > 50
    assert dropped > 5
    assert zooms > 300
    assert (hits > 500) == prefix_caching


def test_a_crowd_over_two_pools_gets_what_each_would_get_alone() -> None:
    preemptions = hits = images = 0
    for seed in range(36):
        engine, accepted = crowd(seed, overlap=bool(seed % 2), prefix_caching=True, pools=True)
        verify(engine, accepted)
        stats = engine.scheduler.stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hit_tokens
        images += sum(
            engine.pool.in_vision(block)
            for plan in engine.plans
            for _, _, block, _ in plan.block_table_updates
        )
    assert preemptions > 30
    assert hits > 200
    assert images > 300


def curious_crowd(seed: int, *, overlap: bool, prefix_caching: bool) -> tuple[Engine, dict[str, Request]]:
    """Forty questions about two images, all with views to choose, in steps and pools that mostly hold
    what is chosen; some are cancelled, some steps fail, some images are deleted."""
    draw = Random(seed)
    limits = SchedulerConfig(
        max_num_seqs=draw.choice([2, 4, 8]),
        max_step_tokens=draw.choice([20, 40]),
        max_model_len=48,
        block_size=draw.choice([1, 2, 4]),
        max_encode_patches=draw.choice([16, 40]),
        max_queue=100,
        itl_target=draw.choice([None, None, 6.0]),
        patience=draw.choice([0.1, 1.0]),
        early_exit=draw.choice([EarlyExit(), EarlyExit(8)]),
    )
    world = World(
        limits,
        blocks=48 // limits.block_size + draw.randrange(24 // limits.block_size),
        feature_bytes=draw.choice([150, 1000]),
        overlap=overlap,
        prefix_caching=prefix_caching,
        slots=(60, 0, 5)[seed % 3],
        outcomes=(2, 4, 6)[seed // 3 % 3],
        early_relevance=seed % 2 > 0,
    )
    engine = world.engine()
    accepted: dict[str, Request] = {}
    for number in range(40):
        one = image(draw.randrange(2), 0, 2, 2)
        prompt = [IMAGE_ID, *[draw.randrange(2, 8) for _ in range(draw.randrange(6))]]
        request = question(
            f"r{number}",
            prompt + [7] * draw.randrange(3),
            (one,),
            max_tokens=draw.randrange(1, 20),
            min_tokens=draw.randrange(10),
            n=draw.choice([1, 1, 1, 1, 2]),
            zooming=zooming(len(prompt), (0,), 4, (one,)),
        )
        engine.add(request)
        accepted[request.id] = request
        for _ in range(draw.choice([0, 1, 2, 9])):
            engine.step()
        chance = draw.random()
        if chance < 0.1:
            engine.cancel(f"r{draw.randrange(number + 1)}")
        elif chance < 0.15:
            engine.fail()
        elif chance < 0.2:
            engine.scheduler.delete_image(one.view.content)
        elif chance < 0.3:
            preempt(engine, draw.randrange(8))
    engine.run(most_steps(accepted, limits))
    return engine, accepted


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_with_zoomed_views_gets_what_each_would_get_alone(
    overlap: bool, prefix_caching: bool
) -> None:
    looks = preemptions = 0
    for seed in range(36):
        engine, accepted = curious_crowd(seed, overlap=overlap, prefix_caching=prefix_caching)
        verify(engine, accepted)
        stats = engine.scheduler.stats()
        looks += stats.looks
        preemptions += stats.preemptions
    assert preemptions > 80
    assert looks > 1000
