"""Predicts the time of a step from what it does, and learns from the time steps take.

The prediction is a sum of parts, each a coefficient (ms per unit) times a quantity of the step:

    fixed        1                            reading the weights, launching
    mixed        1 if there is any prefill    overhead over a decode step in a CUDA graph
    row          slices of a single token     sampling, KV writes
    context      tokens those attend to       reading the KV cache
    token        prompt tokens                activations
    crowded      tokens beyond the ridge      arithmetic of the matrices; below the ridge reading them takes
                                              longer, so max(bytes, operations) is a hinge
    pair         query-key pairs of prompts   attention of the prompts
    encoding     1 if any view is encoded     the vision tower's weights
    patch        patches encoded              arithmetic of the tower
    patch_pair   pairs of patches per view    attention of the tower

For a view that passes only some layers of the tower, the last three count by the share of those layers.

The prior (cost_prior.py) gives the coefficients. One non-negative factor for each is learnt, by recursive
least squares on the relative error. Outliers weigh less (Huber). Old observations fade, but only in the parts
that a new one involves, so that hours of text do not unlearn the cost of images.
"""

import math
from bisect import bisect_left
from dataclasses import astuple, dataclass, fields, replace
from operator import mul

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ConfigError

MEMORY = 400  # observations of a part after which an old one has lost 63% of its weight
TRUST = 0.02  # weight of the prior; 1 would be an observation in which the part was the whole step
SURPRISE = 3.0  # mean errors beyond which an observation counts as an outlier
SWEEPS = 2  # of coordinate descent per observation
_FADE = math.exp(-0.5 / MEMORY)  # of the square root of a weight, per observation
ENCODING_PARTS = 3  # the last quantities: those of views
SMALLEST_MS = 1e-9  # of a coefficient and of a step, to divide by


@dataclass(frozen=True)
class Coefficients:
    """Milliseconds per unit, in the order of `Work.quantities`."""

    fixed: float
    mixed: float
    row: float
    context: float
    token: float
    crowded: float
    pair: float
    encoding: float
    patch: float
    patch_pair: float
    ridge: float  # not a coefficient: tokens from which on arithmetic takes longer than reading the weights

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise ConfigError(f"the cost {field.name!r} is {value!r}; it must be a number, 0 or more")

    @property
    def parts(self) -> tuple[float, ...]:
        return astuple(self)[:-1]

    def times(self, factors: tuple[float, ...]) -> "Coefficients":
        names = [field.name for field in fields(self)][:-1]
        products = [part * factor for part, factor in zip(self.parts, factors, strict=True)]
        return replace(self, **dict(zip(names, products, strict=True)))


@dataclass(slots=True)
class Work:
    """What a step does, in quantities that cost time."""

    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: int = 0
    encoding: float = 0.0
    patches: float = 0.0
    patch_pairs: float = 0.0

    def add_row(self, start: int, count: int) -> None:
        if count == 1:
            self.rows += 1
            self.context += start + 1
        else:
            self.tokens += count
            self.pairs += pairs(start, count)

    def add_view(self, patches: int, share: float = 1.0) -> None:
        """`share`: of the tower's layers, where the view does not pass all of them."""
        self.encoding = max(self.encoding, share)
        self.patches += patches * share
        self.patch_pairs += patches * patches * share

    def quantities(self, ridge: float, sizes: tuple[int, ...] = ()) -> tuple[float, ...]:
        """`sizes`: what prompt tokens are padded to, up to the largest."""
        tokens = self.tokens
        if sizes and 0 < tokens <= sizes[-1]:
            tokens = sizes[bisect_left(sizes, tokens)]
        crowd = self.rows + tokens - ridge
        return (
            1.0,
            1.0 if tokens else 0.0,
            self.rows,
            self.context,
            tokens,
            crowd if crowd > 0 else 0.0,
            self.pairs,
            self.encoding,
            self.patches,
            self.patch_pairs,
        )


def pairs(start: int, count: int) -> int:
    """Query-key pairs of `count` causal positions from `start` on."""
    return count * start + count * (count + 1) // 2


class CostModel:
    def __init__(self, prior: Coefficients, *, learning: bool = True, sizes: tuple[int, ...] = ()) -> None:
        """`sizes`: what the prefill tokens of CUDA graphs are padded to, if they are."""
        self.prior = prior
        self._sizes = sizes
        self.error = 1.0  # recent mean of |predicted - actual| / actual
        self.observations = 0
        self._learning = learning
        self._unit = np.maximum(np.array(prior.parts), SMALLEST_MS)
        size = len(self._unit)
        self._factors = np.ones(size)
        self._gram = np.zeros((size, size))  # sum of weighted outer products
        self._targets = np.zeros(size)  # sum of weighted products with the measurements
        self._current = tuple(self._unit.tolist())

    @property
    def coefficients(self) -> Coefficients:
        """The prior times what has been learnt."""
        return self.prior.times(tuple(self._factors.tolist()))

    def quantities(self, work: Work) -> tuple[float, ...]:
        return work.quantities(self.prior.ridge, self._sizes)

    def predict(self, work: Work) -> float:
        """Milliseconds."""
        return self.price(self.quantities(work))

    def price(self, quantities: tuple[float, ...]) -> float:
        return float(sum(map(mul, self._current, quantities)))

    def encoding(self, work: Work) -> float:
        """Milliseconds of a step that its views are expected to take."""
        quantities = self.quantities(work)[-ENCODING_PARTS:]
        return float(sum(map(mul, self._current[-ENCODING_PARTS:], quantities)))

    def tokens_within(self, limit: float, work: Work, start: int, most: int) -> int:
        """How many prompt tokens from position `start` on can join the work, `most` at most, if the step may
        take `limit` milliseconds."""
        tried = replace(work)

        def fits(count: int) -> bool:
            tried.tokens, tried.pairs = work.tokens + count, work.pairs + pairs(start, count)
            return self.predict(tried) <= limit

        if fits(most):
            return most
        low, high = 0, most  # low fits or is nothing, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def layers_within(self, limit: float, work: Work, patches: int, depth: int, most: int) -> int:
        """How many of a tower's `depth` layers a view can pass beside the work, `most` at most, if the step
        may take `limit` milliseconds."""
        for layers in range(most, 0, -1):
            tried = replace(work)
            tried.add_view(patches, layers / depth)
            if self.predict(tried) <= limit:
                return layers
        return 0

    def observe(self, quantities: tuple[float, ...], milliseconds: float) -> None:
        """Learn from a step, or from several at once: quantities add up."""
        actual = max(milliseconds, SMALLEST_MS)
        surprise = abs(self.price(quantities) - actual) / actual
        usual = max(self.error, 0.02)
        weight = min(1.0, SURPRISE * usual / max(surprise, SMALLEST_MS))
        self.observations += 1
        # A plain mean of the first observations, then a running one.
        self.error += (min(surprise, 4 * usual + 1) - self.error) / min(self.observations, MEMORY / 8)
        if self._learning:
            self._learn(np.array(quantities) * self._unit / actual, weight)

    def _learn(self, shares: NDArray[np.float64], weight: float) -> None:
        """`shares`: what part of the measured time the prior gives each quantity; times the factors looked
        for, they should add up to 1."""
        keep = np.where(shares > 0, _FADE, 1.0)
        pull = self._targets - self._gram @ self._factors  # towards what the past still asks for
        self._gram *= np.outer(keep, keep)
        self._targets = self._gram @ self._factors + keep * pull
        self._gram += weight * np.outer(shares, shares)
        self._targets += weight * shares
        factors, gram = self._factors, self._gram
        involved = np.flatnonzero(shares).tolist()
        own = (gram.diagonal() + TRUST).tolist()
        targets = (self._targets + TRUST).tolist()
        for part in involved * SWEEPS:
            missing = targets[part] - float(gram[part] @ factors) - TRUST * float(factors[part])
            factors[part] = max(float(factors[part]) + missing / own[part], 0.0)
        self._current = tuple((self._unit * factors).tolist())
