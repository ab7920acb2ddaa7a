"""Where a kernel is tested and in which dtype: Triton's interpreter on the CPU, or the GPU (`-m gpu`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from saccade.kernels.jit import TRITON

CUDA = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not TRITON, reason="needs Triton")
_interpreted = (
    needs_triton,
    pytest.mark.skipif(CUDA, reason="with a GPU the kernels are compiled for it; see the gpu variants"),
)
_compiled = (pytest.mark.gpu, needs_triton, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))


@contextmanager
def where_it_fits() -> Iterator[None]:
    """Within: a tuning that is a mere candidate, or meant for narrower values, may be too large for it."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        pytest.skip(str(error))


class Place(NamedTuple):
    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)


def _place(device: str, dtype: torch.dtype) -> object:
    marks = _compiled if device == "cuda" else _interpreted
    return pytest.param(Place(device, dtype), marks=marks, id=f"{device}-{str(dtype)[6:]}")


# The interpreter's bfloat16 dot is wrong: there it is left to the GPU.
PLACES = [
    _place("cpu", torch.float32),
    _place("cpu", torch.float16),
    _place("cuda", torch.float32),
    _place("cuda", torch.float16),
    _place("cuda", torch.bfloat16),
]
EXACT = [_place("cpu", torch.float32), _place("cuda", torch.float32)]

# Largest error over the largest value: the last bit of a sum, twice the last bit of a rounded product.
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all()), "the kernel left poison, or made some"
    error = (actual.double() - expected.double()).abs().max() if actual.numel() else torch.zeros(())
    size = expected.double().abs().max().clamp(min=1e-6) if actual.numel() else torch.ones(())
    limit = CLOSE[dtype] * scale
    assert float(error / size) < limit, f"relative error {float(error / size):.2e}, at most {limit:.0e}"


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch.empty hand out NaN (or the least integer): what a kernel forgets to write shows."""
    plain = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = plain(*args, **kwargs)  # type: ignore[call-overload]
        if made.dtype == torch.bool:
            return made.fill_(False)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)

    monkeypatch.setattr(torch, "empty", poisoned)
