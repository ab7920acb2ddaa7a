"""What is kept on a CPU lies apart from the heap of activations, and is given back."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade.encoder.cache.transfer import CpuTransfer
from saccade.host import allocator as module
from saccade.host.allocator import copy_to_own_mapping, empty_in_own_mapping

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def mapping_of(address: int) -> str | None:
    """The line of /proc that has the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return None


def lies_apart(tensor: Tensor) -> bool:
    """In whole pages of its own, which no block of the heap can share."""
    line = mapping_of(tensor.data_ptr())
    return line is not None and "[heap]" not in line and tensor.data_ptr() % 4096 == 0


def test_a_copy_has_the_same_values_in_pages_of_its_own() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        original = torch.arange(60).view(3, 20).to(dtype)[:, ::2]
        kept = copy_to_own_mapping(original)
        assert torch.equal(kept, original)
        assert kept.is_contiguous()
        assert lies_apart(kept)
        kept.zero_()
        assert original.any()


def test_an_empty_tensor_can_be_kept() -> None:
    assert copy_to_own_mapping(torch.empty(0, 7)).shape == (0, 7)


def test_freed_tensors_are_returned_to_the_system() -> None:
    kept = empty_in_own_mapping((64 << 20,), torch.uint8)
    view, address = kept[1 << 20 :], kept.data_ptr()
    del kept
    assert mapping_of(address) is not None  # the view holds it
    del view
    assert mapping_of(address) is None


def test_beyond_the_mapping_limit_the_heap_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(module, "MOST_MAPPINGS", len(module._mappings) + 2)
    kept = [copy_to_own_mapping(torch.ones(3)) for _ in range(4)]
    assert [lies_apart(one) for one in kept] == [True, True, False, False]
    assert all(torch.equal(one, torch.ones(3)) for one in kept)
    del kept[0]
    assert lies_apart(copy_to_own_mapping(torch.ones(3)))


def test_tables_and_features_have_their_own_mappings() -> None:
    transfer = CpuTransfer()
    features = torch.randn(5, 12)
    down = transfer.to_host(features)
    up = transfer.to_device(down)
    assert isinstance(up, Tensor)
    into, data = transfer.allocate_host("F32", (5, 12))
    data[:] = transfer.to_bytes(down).data
    for kept in (down.tensor, up, into.tensor):
        assert lies_apart(kept)
        assert torch.equal(kept, features)


def test_the_heap_is_used_if_mmap_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", none_left)
    assert torch.equal(copy_to_own_mapping(torch.arange(5)), torch.arange(5))
