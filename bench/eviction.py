"""What eviction rules save of the vision tower's work, on skewed traffic: `python -m bench.eviction`.

A trace asks for images of different sizes; a cache of a share of all their bytes answers some. It reports the
share of bytes found there: encoding an image takes time in proportion to its bytes, so this is the share of
the work saved. `worth` is the rule of `saccade.encoder.cache.tiers`, run by that very code.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator

from saccade.encoder.cache.tiers import CacheTier

LENGTH = 60_000
PICTURES = 4000
SHARES = (0.02, 0.05, 0.2)  # of the bytes of all images
Trace = Callable[[int, Generator], Iterator[int]]


def _favourites(count: int, rng: Generator) -> Iterator[int]:
    weights = 1 / np.arange(1, PICTURES + 1) ** 0.9
    return iter(rng.choice(PICTURES, size=count, p=weights / weights.sum()).tolist())


def _with_strangers(count: int, rng: Generator) -> Iterator[int]:
    """Half of the images are seen once and never again."""
    for number, favourite in enumerate(_favourites(count, rng)):
        yield favourite if rng.random() < 0.5 else PICTURES + number


def _changing(count: int, rng: Generator) -> Iterator[int]:
    """The frequent images change ten times."""
    for number, favourite in enumerate(_favourites(count, rng)):
        yield favourite + 10 * number // count * (PICTURES // 10)


def _conversations(count: int, rng: Generator) -> Iterator[int]:
    """A third new images, two fifths questions on one of the last 300, the rest favourites."""
    recent: list[int] = []
    for number, favourite in enumerate(_favourites(count, rng)):
        chance = rng.random()
        if chance < 0.35 or not recent:
            recent = [*recent[-299:], PICTURES + number]
            yield recent[-1]
        else:
            yield recent[int(rng.integers(len(recent)))] if chance < 0.75 else favourite


TRACES: dict[str, Trace] = {
    "skewed": _favourites,
    "skewed, half strangers": _with_strangers,
    "changing favourites": _changing,
    "conversations": _conversations,
}


def _requests(trace: str, count: int) -> list[tuple[bytes, int]]:
    """Keys and sizes in tokens: a few hundred for most, thousands for some."""
    rng = np.random.default_rng(0)
    sizes: dict[int, int] = {}
    asked = []
    for name in TRACES[trace](count, rng):
        if name not in sizes:
            sizes[name] = int(np.clip(rng.lognormal(6.2, 0.9), 64, 8192))
        asked.append((b"%d" % name, sizes[name]))
    return asked


def _by_value(asked: list[tuple[bytes, int]], budget: int) -> int:
    tier: CacheTier[None] = CacheTier(budget)
    found = 0
    for key, size in asked:
        if key in tier:
            tier.use(key)
            found += size
        else:
            tier.put(key, None, size)
            tier.evict()
    return found


def _by_recency(asked: list[tuple[bytes, int]], budget: int) -> int:
    kept: OrderedDict[bytes, int] = OrderedDict()
    found = used = 0
    for key, size in asked:
        if key in kept:
            found += size
            kept.move_to_end(key)
            continue
        kept[key] = size
        used += size
        while used > budget:
            used -= kept.popitem(last=False)[1]
    return found


RULES = {"recency": _by_recency, "worth": _by_value}


def work_saved(trace: str, rule: str, count: int = LENGTH, share: float = 0.05) -> float:
    """Share of the bytes asked for that were there."""
    asked = _requests(trace, count)
    budget = int(share * sum(dict(asked).values()))
    return RULES[rule](asked, budget) / sum(size for _, size in asked)


def main() -> None:
    print(f"{'work saved, of':28}" + "".join(f"{share:>8.0%} {rule:8}" for share in SHARES for rule in RULES))
    for trace in TRACES:
        saved = [work_saved(trace, rule, share=share) for share in SHARES for rule in RULES]
        print(f"{trace:28}" + "".join(f"{one:>8.1%} {'':8}" for one in saved))


if __name__ == "__main__":
    main()
