"""KV swap on CUDA: blocks survive the round trip while the main stream computes and overwrites."""

from collections.abc import Iterator

import pytest
import torch

from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.swap_copies import STAGED, HostPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS = 3 * STAGED
Block = list[torch.Tensor]


def make_pages(compact: int = 0, side: int = 0, blocks: int = BLOCKS) -> Pages:
    """Blocks of 16 tokens, the last `compact` of them in 8 bits, all of noise."""
    (group,) = full_attention(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
    pages = Pages.allocate(group, blocks, "cuda", compact, torch.int8 if compact else None, side)
    for tensor in tensors(pages):
        tensor.copy_(torch.randint(-100, 100, tensor.shape, device="cuda").to(tensor.dtype))
    torch.cuda.synchronize()
    return pages


def tensors(pages: Pages) -> Iterator[torch.Tensor]:
    return (tensor for part in pages.parts() for tensor in part.tensors)


def content(pages: Pages, block: int) -> Block:
    return [
        tensor[:, block - part.first].clone()
        for part in pages.parts()
        if part.first <= block < part.first + part.blocks
        for tensor in part.tensors
    ]


def is_same(one: Block, other: Block) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def overwrite(pages: Pages, blocks: list[int]) -> None:
    """Write other values to blocks on the main stream, as the step's own tokens do."""
    for part in pages.parts():
        inside = [block - part.first for block in blocks if 0 <= block - part.first < part.blocks]
        for tensor in part.tensors:
            for block in inside:
                tensor[:, block].zero_()


def keep_busy(milliseconds: float = 5.0) -> None:
    """Work on the current stream that is still running when the host goes on."""
    torch.cuda._sleep(int(milliseconds * 1e6))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("side", [0, 6])
@pytest.mark.parametrize("compact", [0, STAGED, BLOCKS])
def test_blocks_come_back_bit_for_bit_to_other_blocks_of_their_kind(compact: int, side: int) -> None:
    pages = make_pages(compact, side)
    host = HostPages(pages, STAGED)
    plain = BLOCKS - compact
    gone = [block for block in (0, 5, plain - 2, plain, BLOCKS - 2) if 0 <= block < BLOCKS]
    gone = sorted({block for block in gone if block + 1 < BLOCKS and (block < plain) == (block + 1 < plain)})
    before = {block: content(pages, block) for block in range(BLOCKS)}
    host.swap([(block, slot) for slot, block in enumerate(gone, 3)], (), wait=False)
    overwrite(pages, list(range(BLOCKS)))
    host.swap((), [(slot, block + 1) for slot, block in enumerate(gone, 3)], wait=True)
    for block in gone:
        assert is_same(content(pages, block + 1), before[block])
    untouched = set(range(BLOCKS)) - {block + 1 for block in gone}
    assert all(not tensor.any() for block in untouched for tensor in content(pages, block))


def test_a_block_is_saved_before_the_step_that_swaps_it_out_overwrites_it() -> None:
    """More blocks than the two staging buffers hold, on a main stream that is behind and stays busy."""
    pages = make_pages(blocks=5 * STAGED)
    count = 4 * STAGED
    host = HostPages(pages, count)
    before = [content(pages, block) for block in range(count)]
    torch.cuda.synchronize()
    keep_busy()
    host.swap([(block, count - 1 - block) for block in range(count)], (), wait=False)
    overwrite(pages, list(range(count)))
    keep_busy()
    host.swap((), [(count - 1 - block, block) for block in range(count)], wait=True)
    assert all(is_same(content(pages, block), before[block]) for block in range(count))


def test_blocks_written_just_before_the_swap_are_saved_as_written() -> None:
    pages = make_pages()
    host = HostPages(pages, 1)
    torch.cuda.synchronize()
    keep_busy(20)
    for tensor in tensors(pages):
        tensor[:, 7].fill_(3)  # queued behind the busy stream
    host.swap([(7, 0)], (), wait=False)
    overwrite(pages, [7])
    host.swap((), [(0, 9)], wait=True)
    assert all(bool((tensor[:, 9] == 3).all()) for tensor in tensors(pages))


def test_without_wait_the_next_step_finds_the_blocks_and_this_one_runs_beside_the_copies() -> None:
    pages = make_pages()
    host = HostPages(pages, STAGED)
    before = [content(pages, block) for block in range(STAGED)]
    out = [(block, block) for block in range(STAGED)]
    host.swap(out, (), wait=False)
    overwrite(pages, list(range(STAGED)))
    others = [content(pages, block) for block in range(2 * STAGED, BLOCKS)]
    host.swap((), [(slot, STAGED + slot) for slot in range(STAGED)], wait=False)
    product = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):  # the step: it reads and writes other blocks meanwhile
        product = torch.tanh(product @ product)
        pages.k[:, 2 * STAGED :].mul_(1)
    host.swap((), (), wait=False)  # the next step
    for block in range(STAGED):
        assert is_same(content(pages, STAGED + block), before[block])
    assert all(is_same(content(pages, block), other) for block, other in enumerate(others, 2 * STAGED))
    assert bool(torch.isfinite(product).all())


def test_a_slot_is_read_before_it_is_written_again_over_many_steps() -> None:
    """Every step swaps out a block, brings the one of the step before back, and reuses its slot at once."""
    pages = make_pages()
    host = HostPages(pages, 2)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(BLOCKS - 1, generator=generator).tolist()
    before = {block: content(pages, block) for block in range(BLOCKS)}
    home = BLOCKS - 1  # where each block comes back to
    torch.cuda.synchronize()
    returned: list[tuple[int, Block]] = []
    for step, block in enumerate(order):
        keep_busy(0.2)
        slot = step % 2
        back = [(1 - slot, home)] if step else []
        host.swap([(block, slot)], back, wait=bool(step % 3))
        overwrite(pages, [block])
        if step:
            host.swap((), (), wait=False)  # waits for what is still coming in
            returned.append((order[step - 1], content(pages, home)))
    torch.cuda.synchronize()
    assert len(returned) == len(order) - 1
    assert all(is_same(found, before[block]) for block, found in returned)


def test_the_rate_is_measured_and_changes_nothing() -> None:
    pages = make_pages()
    before = [content(pages, block) for block in range(BLOCKS)]
    assert HostPages(pages, STAGED).measure_rate() > 1e8
    assert all(is_same(content(pages, block), before[block]) for block in range(BLOCKS))
