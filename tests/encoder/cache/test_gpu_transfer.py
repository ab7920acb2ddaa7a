"""Host-tier copies on CUDA: features survive round trips under concurrent stream work."""

import pytest
import torch
from torch import Tensor

from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.cache.tiers import PendingUpload
from saccade.encoder.cache.transfer import CudaTransfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = 256, 2048  # 1 MB in bfloat16


def make_features(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(SHAPE, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def wait(uploaded: "Tensor | PendingUpload[Tensor]") -> Tensor:
    return uploaded.wait() if isinstance(uploaded, PendingUpload) else uploaded


def keep_busy(milliseconds: float = 5.0) -> None:
    """Work on the current stream that is still running when the host goes on."""
    torch.cuda._sleep(int(milliseconds * 1e6))  # type: ignore[no-untyped-call]


def make_transfer() -> CudaTransfer:
    return CudaTransfer(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_features_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    transfer, features = make_transfer(), make_features(0, dtype)
    host = transfer.to_host(features)
    again = wait(transfer.to_device(host))
    assert again.data_ptr() != features.data_ptr()
    assert torch.equal(again, features)
    assert transfer.to_bytes(host).data == transfer.to_bytes(transfer.to_host(again)).data


def test_features_still_being_computed_are_copied_complete() -> None:
    transfer, expected = make_transfer(), make_features(1)
    buffer = torch.zeros_like(expected)
    torch.cuda.synchronize()
    keep_busy(20)
    buffer.copy_(expected)  # queued behind the busy stream
    host = transfer.to_host(buffer)
    assert torch.equal(wait(transfer.to_device(host)), expected)


def test_freed_device_memory_is_not_reused_before_its_copy_to_the_host_is_over() -> None:
    """The last reference goes at once; the compute stream then allocates and overwrites as much memory."""
    transfer = make_transfer()
    expected = [make_features(seed).cpu() for seed in range(16)]
    hosts = []
    for seed in range(16):
        hosts.append(transfer.to_host(make_features(seed)))
        scratch = [torch.full(SHAPE, 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        del scratch
    for host, right in zip(hosts, expected, strict=True):
        transfer.to_bytes(host)  # waits for the copy
        assert torch.equal(host.tensor, right)


def test_freed_host_memory_is_not_reused_before_its_copy_to_the_device_is_over() -> None:
    transfer = make_transfer()
    expected = [make_features(seed) for seed in range(16)]
    uploads = []
    for features in expected:
        host = transfer.to_host(features)
        uploads.append(transfer.to_device(host))
        del host  # the next pinned buffer may take its place
        other, data = transfer.allocate_host("BF16", SHAPE)
        data[:] = bytes(len(data))
        del other, data
    assert all(torch.equal(wait(one), right) for one, right in zip(uploads, expected, strict=True))


def test_the_compute_stream_waits_for_an_upload_where_the_features_are_read() -> None:
    transfer, features = make_transfer(), make_features(3)
    hosts = [transfer.to_host(features) for _ in range(8)]
    torch.cuda.synchronize()
    uploads = [transfer.to_device(host) for host in hosts]  # eight copies queue on the copy stream
    sums = [wait(one).float().sum() for one in reversed(uploads)]  # launched before they are over
    right = features.float().sum()
    assert all(torch.equal(one, right) for one in sums)


def test_uploaded_features_may_be_freed_while_the_compute_stream_still_reads_them() -> None:
    transfer, features = make_transfer(), make_features(4)
    host = transfer.to_host(features)
    results = []
    for _ in range(8):
        uploaded = wait(transfer.to_device(host))
        keep_busy(2)
        results.append(uploaded.float().sum())
        del uploaded  # its memory goes back to the copy stream, whose next upload may take it
    assert all(torch.equal(one, features.float().sum()) for one in results)


def test_the_cache_demotes_and_promotes_features_bit_for_bit_under_load() -> None:
    """A device tier of four views, a host tier of sixty-four, and a compute stream that never rests."""
    nbytes = make_features(0).nbytes
    cache: EncoderCache[Tensor] = EncoderCache(4 * nbytes, host=64 * nbytes, transfer=make_transfer())
    keys = [bytes([seed]) * 16 for seed in range(24)]
    right = [make_features(seed) for seed in range(24)]
    product = torch.randn(1024, 1024, device="cuda")
    for seed, key in enumerate(keys):
        product = torch.tanh(product @ product)
        cache.pin(key)
        cache.put(key, make_features(seed), nbytes, content=key)
        cache.unpin(key)
        cache.check()
    assert cache.stats.downs >= 20
    order = torch.randperm(24 * 4, generator=torch.Generator().manual_seed(0)).tolist()
    for number in order:
        seed = number % 24
        product = torch.tanh(product @ product)
        cache.pin(keys[seed])
        assert torch.equal(cache.get(keys[seed]), right[seed])
        cache.unpin(keys[seed])
        cache.check()
    assert cache.stats.ups > 20
    assert cache.stats.misses == 24
