"""Tunings of the products of a decode layer, searched within the layer, on a GPU.

    PYTHONPATH=src python3 -m bench.descend [--groups 1 8,16 32 64] [--late] [--rounds 2]

A product timed by itself starts on an idle chip and ends on one. In a layer its first weights can come while
the kernel before it works, and what it leaves half done is another kernel's wait. So one product after the
other is given each of its candidates, the others staying as they are, and the one with the quickest layer is
kept; then how far it looks ahead is turned. Rounds follow until none gains. Rows of one group share their
tunings: the sum of their times decides. All kernels are launched early, or with `--late` none. At the end the
layer is timed the other way too, and the lines for TUNED and LEFT (kernels/gemm/skinny.py) are printed.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

import torch

from bench.candidates import candidates, for_few
from bench.choose_many import written
from bench.kernel_cases import PRODUCTS, Layer, make_layer
from bench.kernels import seconds
from bench.many_rows import CONTEXT, LAYER, Ways, layer, tables
from saccade.kernels.gemm.skinny import MOST_ROWS, SkinnyTuning
from saccade.kernels.gemm.tuning_model import LIMITS
from saccade.kernels.jit import compile_only

GAIN = 0.998  # of the time before: less is taken for noise
AHEADS = (0, 128, 256, 512, 1024, 2048, 4096)
Option = tuple[SkinnyTuning | None, bool]  # None: the library; whether parts are left (qkv)


class Search:
    def __init__(self, group: Sequence[int], device: torch.device, *, early: bool) -> None:
        self.group, self._early = group, early
        self._inputs = {rows: [make_layer(rows, CONTEXT, device, i) for i in range(4)] for rows in group}
        self.ways = tables(max(group))
        self.best = self.time(self.ways)
        library = self.time(Ways({}))
        told = f"{self.best * 1e6:.1f} us as the tables say, {self.named(not early)} "
        told += f"{self.time(self.ways, other=True) * 1e6:.1f}; the library's {library * 1e6:.1f}, "
        told += f"{self.named(not early)} {self.time(Ways({}), other=True) * 1e6:.1f}"
        print(f"\n{self.title}, {self.named(early)}: {told}", flush=True)

    @property
    def title(self) -> str:
        return f"rows {' + '.join(map(str, self.group))}"

    @staticmethod
    def named(early: bool) -> str:
        return "early" if early else "late"

    def time(self, ways: Ways, *, other: bool = False) -> float:
        """Seconds of a layer, summed over the group; endless where it does not run on this chip. `other`:
        launched the other way."""
        early = self._early != other
        try:
            return sum(seconds(lambda x: layer(ways, x, early=early), self._inputs[n]) for n in self.group)
        except Exception as error:
            print(f"    {type(error).__name__} {str(error)[:100]}")
            return float("inf")

    def with_product(self, name: str, option: Option) -> Ways:
        tuning, left = option
        by = {one: t for one, t in self.ways.by.items() if one != name}
        by |= {} if tuning is None else {name: tuning}
        return Ways(by, left if name == "qkv" else self.ways.left)

    def options(self, name: str) -> Iterator[Option]:
        columns, depth, gated = PRODUCTS[name]
        yield None, False
        rows = max(self.group)
        more = for_few(rows, columns, depth, gated) if rows <= MOST_ROWS else []
        for tuning in (*candidates(rows, columns, depth, gated), *more):
            if tuning.mode != "fma" or self.group == [1]:
                yield tuning, False
                if name == "qkv" and tuning.splits > 1:
                    yield tuning, True

    def compile(self) -> None:
        one: Layer = self._inputs[self.group[0]][0]
        with compile_only():
            for name in LAYER:
                for option in self.options(name):
                    layer(self.with_product(name, option), one, early=self._early)

    def turn(self, name: str) -> bool:
        """Try every candidate of one product; whether one was better."""
        found = {option: self.time(self.with_product(name, option)) for option in self.options(name)}
        for (tuning, left), took in sorted(found.items(), key=lambda item: item[1])[:4]:
            told = "library" if tuning is None else f"{'left ' if left else ''}{tuning.name}"
            print(f"  {name:8} {told:28} {took * 1e6:8.1f} us")
        return self._keep(name, min(found, key=lambda option: found[option]), min(found.values()))

    def turn_ahead(self, name: str) -> bool:
        tuning = self.ways.by.get(name)
        if tuning is None:
            return False
        options = [(tuning._replace(ahead=ahead), self.ways.left) for ahead in AHEADS if ahead]
        found = {option: self.time(self.with_product(name, option)) for option in options}
        told = "  ".join(f"{one.ahead}: {took * 1e6:.1f}" for (one, _), took in found.items())
        print(f"  {name:8} ahead {told}", flush=True)
        return self._keep(name, min(found, key=lambda option: found[option]), min(found.values()))

    def _keep(self, name: str, option: Option, took: float) -> bool:
        if took >= self.best * GAIN:
            return False
        self.ways, self.best = self.with_product(name, option), took
        print(f"  {name:8} kept: {took * 1e6:.1f} us", flush=True)
        return True

    def lines(self) -> Iterator[str]:
        limit = next(limit for limit in LIMITS if max(self.group) <= limit)
        for name in LAYER:
            tuning = self.ways.by.get(name)
            columns, depth, gated = PRODUCTS[name]
            if name == "qkv" and self.ways.left and tuning is not None:
                yield f"    LEFT  ({limit}, {columns}, {depth}): {written(tuning)},  # {name}"
            else:
                value = "None" if tuning is None else written(tuning)
                yield f"    ({limit}, {columns}, {depth}, {gated}): {value},  # {name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", default=["1", "8,16", "32", "64"], help="of rows")
    parser.add_argument("--late", action="store_true", help="no kernel is launched early")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no product is begun")
    options = parser.parse_args()
    device, began = torch.device("cuda"), time.perf_counter()
    for group in options.groups:
        with torch.inference_mode():
            search = Search([int(rows) for rows in group.split(",")], device, early=not options.late)
            search.compile()
            print(f"  compiled after {time.perf_counter() - began:.0f} s", flush=True)
            for _ in range(options.rounds):
                gained = False
                for name in ("o", "down", "gate_up", "qkv"):
                    if time.perf_counter() - began < options.seconds:
                        gained |= search.turn(name)
                        gained |= search.turn_ahead(name)
                if not gained:
                    break
            other = search.time(search.ways, other=True)
            print(f"{search.title}: {search.best * 1e6:.1f} us; launched the other way {other * 1e6:.1f}")
            print("\n".join(search.lines()), flush=True)
        del search
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
