"""The relevance pass: how strongly a question attends to each token of a view, computed after a step.

With a relevance head, every view token stores a vector beside its keys and values (the side page, in the same
blocks, so that sharing, copying and swapping include it), and the question's vector is compared with those.
Without one, the question's queries at a few middle layers are compared with the view's keys. Both need only
the hidden states of the question's last token, so it does not matter how the prompt was cut into steps.

The maps that do not depend on the question are cached per view (`ImageMapsTransfer`). Nothing here waits for
the device.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.encoder.encoder_runner import upload_index, visual_slices
from saccade.errors import CheckpointError
from saccade.kernels.attention.quantized_kv import read_slots
from saccade.kv_cache.pages import Paged, Pages
from saccade.lod.checkpoint_views import RelevanceHead
from saccade.lod.image_maps import ImageMapRunner
from saccade.lod.scorers import RelevanceHeadWeights, from_attention, from_head, unpack_image_maps
from saccade.lod.types import Grid, ImageMaps, RelevanceMaps
from saccade.models.interface import HiddenStateTap, LanguageModel
from saccade.request import Pixels, View
from saccade.step_plan import RelevanceTarget, ScheduledSequence

MAX_CACHED_TOKENS = 1 << 18  # of views with image maps: 19 maps each, 40 MB of host memory
MIDDLE = (0.4, 0.5, 0.625)  # of the decoder's depth: the layers whose queries and keys are compared
TARGETS_PER_CALL = 16  # keys of 256 tokens at three layers of Qwen3-VL-8B are 50 MB in float32


class HostCopy:
    """An asynchronous copy of float32 numbers to the host."""

    def __init__(self, numbers: Tensor) -> None:
        """The source may be overwritten by work launched after this."""
        self._done: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers.clone()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @property
    def ready(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> NDArray[np.float32]:
        if self._done is not None:
            self._done.synchronize()
        return self._numbers.numpy()


class ImageMapsTransfer:
    """The maps of a view that do not depend on the question."""

    def __init__(self, content: bytes, grid: Grid, maps: Tensor) -> None:
        """`maps`: [NUM_IMAGE_MAPS, rows, columns] on the device."""
        self.content = content  # hash of the image
        self.tokens = grid[0] * grid[1]  # of the view
        self._grid = grid
        self._maps: HostCopy | ImageMaps = HostCopy(maps.reshape(-1))

    @property
    def ready(self) -> bool:
        return isinstance(self._maps, ImageMaps) or self._maps.ready

    def wait(self) -> ImageMaps:
        if not isinstance(self._maps, ImageMaps):
            self._maps = unpack_image_maps(self._maps.wait(), self._grid)
        return self._maps


class RelevanceSlice(NamedTuple):
    """The relevance of one target among the numbers of a step."""

    grid: Grid
    image_maps: ImageMapsTransfer
    share: int  # offset of the participatory map
    strength: int  # offset of the strength

    def unpack(self, numbers: NDArray[np.float32]) -> RelevanceMaps:
        share = numbers[self.share : self.share + self.grid[0] * self.grid[1]].reshape(self.grid)
        return RelevanceMaps(
            image_maps=self.image_maps.wait(), participatory=share, strength=float(numbers[self.strength])
        )


class RelevanceTransfer:
    """The relevance of a step's targets."""

    def __init__(self, numbers: HostCopy, targets: tuple[tuple[RelevanceSlice, ...], ...]) -> None:
        self._numbers = numbers
        self._targets = targets  # per sequence with targets
        self._result: tuple[tuple[RelevanceMaps, ...], ...] | None = None

    @property
    def ready(self) -> bool:
        return self._numbers.ready and all(
            one.image_maps.ready for targets in self._targets for one in targets
        )

    def wait(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        if self._result is None:
            numbers = self._numbers.wait()
            self._result = tuple(tuple(one.unpack(numbers) for one in targets) for targets in self._targets)
        return self._result


def compared_layers(depth: int) -> tuple[int, ...]:
    """The layers whose queries and keys are compared, in a decoder of so many layers without a head."""
    return tuple(dict.fromkeys(min(int(depth * part), depth - 1) for part in MIDDLE))


def layers_needed(head: RelevanceHead | None, depth: int) -> int:
    """Layers that a question passes before its relevance can be computed."""
    return compared_layers(depth)[-1] if head is None else head.layer


class _Query(NamedTuple):
    """A relevance target with its sequence's block table and question."""

    target: RelevanceTarget
    table: Tensor  # [blocks] int32
    question: Tensor  # [width] with a head; [layers, heads, dim] without

    @property
    def tokens(self) -> int:
        return self.target.span.view.tokens


class RelevancePass:
    def __init__(
        self,
        model: LanguageModel,
        pages: Pages,
        head: RelevanceHeadWeights | None,
        upload: Callable[[Pixels, bytes], Tensor],  # pixels and content hash of an image
        image_maps: ImageMapRunner | None = None,
    ) -> None:
        depth = len(pages.group.layers)
        if head is not None and (head.layer > depth or pages.side is None):
            raise CheckpointError(
                f"config.json: saccade.relevance has layer {head.layer}; the decoder has {depth} layers"
            )
        self._model, self._pages, self._head, self._upload = model, pages, head, upload
        self._device = device = pages.k.device
        self._image_maps = image_maps or ImageMapRunner(device, None, mode=model.mode)
        # Image maps are computed on a stream of their own, beside tower and steps.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.stores_view_vectors = head is not None
        self._layers = compared_layers(depth)
        self.num_layers = self._layers[-1] if head is None else head.layer  # that a question passes
        self._cached_maps: OrderedDict[bytes, ImageMapsTransfer] = OrderedDict()  # by view key, in LRU order
        self._cached_tokens = 0

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers in front of which a question's last hidden state is needed; none with a head, which needs
        the states of view tokens too."""
        return () if self._head is not None else self._layers

    def start_image_maps(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Before a step with relevance targets: compute their image maps beside it."""
        for target in [target for one in scheduled for target in one.relevance_targets if target.keep]:
            self._maps_of(target)

    def tap(self, scheduled: Sequence[ScheduledSequence]) -> HiddenStateTap:
        """The hidden states that the forward pass must keep: of global views (with a head), then of the
        last token of each question."""
        ends = accumulate(one.num_tokens for one in scheduled)
        last = [end - 1 for end, one in zip(ends, scheduled, strict=True) if one.relevance_targets]
        if self._head is None:
            return HiddenStateTap(dict.fromkeys(self._layers, self._index(last)))
        views = [one.indices for one in visual_slices(scheduled) if one.span.is_target]
        tokens = self._index(np.concatenate([*views, np.array(last, dtype=np.int64)]))
        return HiddenStateTap({self._head.layer: tokens})

    def after_forward(
        self, scheduled: Sequence[ScheduledSequence], positions: Tensor, paged: Paged, tap: HiddenStateTap
    ) -> RelevanceTransfer | None:
        """After an eager forward pass: store vectors of its view tokens, then compute the relevance."""
        states = [tap.states[layer] for layer in tap.tokens]
        tokens = next(iter(tap.tokens.values()))
        asking = [i for i, one in enumerate(scheduled) if one.relevance_targets]
        views = len(tokens) - len(asking)
        if views:
            self._store_view_vectors(states[0][:views], paged.slots[tokens[:views]])
        if not asking:
            return None
        last = [state[views:] for state in states]
        tables = [paged.rows.block_tables[i] for i in asking]
        return self.compute([scheduled[i] for i in asking], last, positions[:, tokens[views:]], tables)

    def compute(
        self,
        scheduled: Sequence[ScheduledSequence],
        states: Sequence[Tensor],
        positions: Tensor,
        tables: Sequence[Tensor],
    ) -> RelevanceTransfer:
        """The relevance of the targets, from the KV cache after the step and the hidden states of each
        sequence's last token: per tapped layer [n, hidden], at positions [3, n]. Line i belongs to sequence
        i; further lines are padding."""
        questions = self._questions(states, positions)
        asking = [i for i, one in enumerate(scheduled) if one.relevance_targets]
        queries = [
            _Query(target, tables[i], questions[..., i, :])
            for i in asking
            for target in scheduled[i].relevance_targets
        ]
        values, parts, size = [], [], 0
        for query, (share, strength) in zip(queries, self._score_all(queries), strict=True):
            grid, maps = query.target.span.view.token_grid, self._maps_of(query.target)
            values.append(RelevanceSlice(grid, maps, size, size + query.tokens))
            parts += [share.reshape(-1), strength.reshape(-1)]
            size += query.tokens + 1
        each = iter(values)
        per_sequence = tuple(tuple(islice(each, len(scheduled[i].relevance_targets))) for i in asking)
        return RelevanceTransfer(HostCopy(torch.cat(parts)), per_sequence)

    def _score_all(self, queries: Sequence[_Query]) -> list[tuple[Tensor, Tensor]]:
        """Share and strength of each query. Views of equally many tokens are scored together: a score is many
        small kernels, and dozens of requests may have one in a step."""
        together = 1 if self._model.mode.deterministic else TARGETS_PER_CALL
        scores: dict[int, tuple[Tensor, Tensor]] = {}
        for tokens in {query.tokens for query in queries}:
            alike = [number for number, query in enumerate(queries) if query.tokens == tokens]
            for first in range(0, len(alike), together):
                some = alike[first : first + together]
                shares, strengths = self._score([queries[number] for number in some])
                scores |= zip(some, zip(shares, strengths, strict=True), strict=True)
        return [scores[number] for number in range(len(queries))]

    def _store_view_vectors(self, states: Tensor, slots: Tensor) -> None:
        if self._head is None or self._pages.side is None:
            raise RuntimeError("only a relevance head stores vectors of view tokens")
        side = self._pages.side.flatten(0, 2)  # [slots, width]
        side.index_copy_(0, slots, (self._head.normed(states) @ self._head.place.T).to(side.dtype))

    def _questions(self, states: Sequence[Tensor], positions: Tensor) -> Tensor:
        """[n, width] with a head; [layers, heads, n, dim] without."""
        if self._head is not None:
            return self._head.normed(states[0]) @ self._head.question.T
        if self._model.mode.deterministic and len(states[0]) > 1:  # n depends on other requests
            ones = [slice(i, i + 1) for i in range(len(states[0]))]
            return torch.cat(
                [self._questions([x[one] for x in states], positions[:, one]) for one in ones], 2
            )
        parts = zip(self._layers, states, strict=True)
        return torch.stack([self._model.queries(layer, x, positions) for layer, x in parts]).transpose(1, 2)

    def _keys(self, slots: Tensor) -> Tensor:
        """Of the compared layers at slots [views, tokens]: [views, layers, tokens, kv_heads, dim]."""
        pages, found = self._pages, []
        for layer in self._layers:
            compact = pages.layer(layer)
            if compact is None:
                keys = pages.k[layer].flatten(0, 1).index_select(0, slots.flatten())
            else:
                k = compact.k
                keys = read_slots(pages.k[layer], k, compact.k_scale, compact.first, slots.flatten())
            found.append(keys.view(*slots.shape, *keys.shape[1:]))
        return torch.stack(found, 1)

    def _score(self, queries: Sequence[_Query]) -> tuple[Tensor, Tensor]:
        """Shares [views, tokens] and strengths [views] of views of equally many tokens."""
        questions = torch.stack([query.question for query in queries])
        slots = self._kv_slots(queries)
        if self._head is None:
            return from_attention(questions[:, :, None], self._keys(slots))
        if self._pages.side is None:
            raise RuntimeError("a head needs side pages")
        side = self._pages.side.flatten(0, 2).index_select(0, slots.flatten())
        return from_head(questions, side.view(*slots.shape, -1))

    def _kv_slots(self, queries: Sequence[_Query]) -> Tensor:
        """Of view tokens, by their sequences' block tables: [views, tokens]."""
        size = self._pages.block_size
        starts = self._index([query.target.span.start for query in queries])
        index = starts[:, None] + torch.arange(queries[0].tokens, device=self._device)
        tables = torch.stack([query.table for query in queries])
        return tables.gather(1, index // size).long() * size + index % size

    def _index(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return upload_index(np.asarray(values, dtype=np.int64), self._device)

    def _maps_of(self, target: RelevanceTarget) -> ImageMapsTransfer:
        """The image maps of a target's view, cached."""
        key = target.span.key
        known = self._cached_maps.get(key)
        if known is not None:
            self._cached_maps.move_to_end(key)
            return known
        view = target.span.view
        maps = self._compute_maps(self._upload(target.pixels, view.content)[0], view)
        if target.keep:
            self._cached_maps[key] = maps
            self._cached_tokens += maps.tokens
            while self._cached_tokens > MAX_CACHED_TOKENS:
                self._cached_tokens -= self._cached_maps.popitem(last=False)[1].tokens
        return maps

    def _compute_maps(self, image: Tensor, view: View) -> ImageMapsTransfer:
        grid = view.token_grid
        if self._stream is None:
            return ImageMapsTransfer(view.content, grid, self._image_maps.maps(image, grid))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            maps = ImageMapsTransfer(view.content, grid, self._image_maps.maps(image, grid))
        image.record_stream(self._stream)
        return maps

    def forget_image(self, content: bytes) -> None:
        """The image was deleted."""
        for key in [key for key, maps in self._cached_maps.items() if maps.content == content]:
            self._cached_tokens -= self._cached_maps.pop(key).tokens
