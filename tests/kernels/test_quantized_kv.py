"""Keys and values in 8 bits: the references."""

import pytest
import torch

from saccade.kernels.attention.quantized_kv import (
    FORMATS,
    LARGEST,
    Compact,
    check_compact,
    compact_write,
    dequantise,
    quantise,
    read_slots,
)
from saccade.kernels.norm_rope.qk_norm_rope import kv_write_reference
from saccade.kv_cache.groups import KVCacheGroup, full_attention
from saccade.kv_cache.pages import Pages


def group(block_size: int, dtype: str = "float32") -> KVCacheGroup:
    return full_attention(1, 3, 8, dtype, block_size)[0]


ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4}  # of the largest, of the value


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
@pytest.mark.parametrize("size", [1e-20, 1.0, 3e4])
def test_what_is_read_back_is_as_near_as_the_format_allows(form: torch.dtype, size: float) -> None:
    x = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0)) * size
    value, scale = quantise(x, form)
    assert value.dtype == form
    assert (scale.shape, scale.dtype) == ((200, 3), torch.float32)
    error = (dequantise(value, scale, torch.float32) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    if form == torch.int8:
        assert bool((error <= largest * ERROR[form] * 1.001).all())
    else:  # a share of the value, or half of the smallest step
        assert bool((error <= torch.maximum(x.abs() * ERROR[form], largest / 448 * 2**-10) * 1.001).all())
    assert torch.allclose(value.float().abs().amax(-1), torch.tensor(LARGEST[form]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_zeros_stay_zeros_and_nan_stays_nan(form: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 5] = float("nan"), float("inf")
    back = dequantise(*quantise(x, form), torch.float32)
    assert torch.equal(back[0], torch.zeros(8))
    assert not bool(back[1:].isfinite().any())


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
@pytest.mark.parametrize("compact_blocks", [4, 9])
def test_each_token_is_written_and_read_in_the_format_of_its_block(
    form: torch.dtype, compact_blocks: int
) -> None:
    pages = Pages.allocate(group(4), 9, "cpu", compact_blocks, form)
    compact = pages.layer(0)
    assert compact is not None
    torch.manual_seed(1)
    k, v = torch.randn(20, 3, 8), torch.randn(20, 3, 8)
    slots = torch.randperm(36)[:20]
    kv_write_reference(k, v, pages.k[0], pages.v[0], slots, compact)
    for x, plain, small, scales in (
        (k, pages.k[0], compact.k, compact.k_scale),
        (v, pages.v[0], compact.v, compact.v_scale),
    ):
        rounded = dequantise(*quantise(x, form), torch.float32)
        kind = slots >= 4 * (9 - compact_blocks)
        expected = torch.where(kind[:, None, None], rounded, x)
        assert torch.equal(read_slots(plain, small, scales, compact.first, slots), expected)
        others = torch.tensor([slot for slot in range(36) if slot not in slots])
        assert not bool(read_slots(plain, small, scales, compact.first, others).any())


def test_compact_pages_that_do_not_fit_the_plain_ones_are_refused() -> None:
    pages = Pages.allocate(group(4), 6, "cpu", 2, torch.int8)
    compact = pages.layer(0)
    assert compact is not None
    check_compact(compact, pages.k[0])
    wrong = {
        "int8 or float8": compact._replace(k=compact.k.int()),
        "beside plain ones": compact._replace(k=compact.k[..., :4], v=compact.v[..., :4]),
        "with scales": compact._replace(v_scale=compact.v_scale.half()),
        "contiguous": compact._replace(k_scale=compact.k_scale.transpose(1, 2).contiguous().transpose(1, 2)),
        "spare one included": compact._replace(first=3),
    }
    for message, other in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_compact(Compact(*other), pages.k[0])


def test_writing_leaves_other_slots_alone() -> None:
    pages = Pages.allocate(group(2), 4, "cpu", 2, torch.int8)
    compact = pages.layer(0)
    assert compact is not None
    values = compact.k

    def written() -> set[tuple[int, int]]:
        return {(block, place) for block, place, _, _ in values.nonzero().tolist()}

    compact_write(torch.ones(1, 3, 8), torch.ones(1, 3, 8), compact, torch.tensor([5]))
    assert written() == {(0, 1)}
    compact_write(torch.ones(1, 3, 8), torch.ones(1, 3, 8), compact, torch.tensor([1]))
    assert written() == {(0, 1), (2, 0)}  # 2: the spare block
