"""Looking, on the device: how the question takes hold of each place of a picture, and what else is there.

takes   a step's inputs, and the hidden states its forward pass handed out, or a captured step kept
gives   the looks of its rows with sights, on their way to the host
owns    the relevance head, where the checkpoint ships one; a small cache of what pictures say by themselves:
        it comes to the host once, computed beside the step that first looks at a picture; looks bring what
        the question adds
never   waits for the device

With a head, every token of a view leaves a vector beside its keys and values (the side page: it lies in the
same blocks, so whoever shares, copies or moves those has it too), and a look compares the question's vector
with those of the view. Without one, a look compares the question's queries at a few middle layers with the
view's keys. Either needs the hidden states of the question's last token alone, so it does not matter how the
prompt was cut into steps, or how much of it another request had computed before.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.encoder.merge_embeddings import visual_slices
from saccade.errors import CheckpointError
from saccade.kernels.attention.quantized_kv import read_slots
from saccade.kv_cache.pages import Paged, Pages
from saccade.lod.checkpoint_views import RelevanceHead
from saccade.lod.image_maps import Stills
from saccade.lod.relevance_transfer import ByItself, HostLooks, Seen, Sent
from saccade.lod.scorers import from_attention, from_head
from saccade.models.interface import HiddenStateTap, LanguageModel
from saccade.request import Pixels, View
from saccade.step_plan import RelevanceTarget, ScheduledSequence

STILLS = 1 << 18  # tokens of views: 19 maps of each and what is made of them, 40 MB of the host's
MIDDLE = (0.4, 0.5, 0.625)  # of the decoder's depth: the layers whose queries and keys are compared
HEAD_EPS = 1e-6
TOGETHER = 16  # looks coupled at once: keys of 256 tokens at three layers of Qwen3-VL-8B are 50 MB in float32


@dataclass(frozen=True)
class Head:
    """score = question(norm(h_question)) . place(norm(h_place)) / sqrt(width), behind `layer` layers."""

    layer: int
    norm: Tensor  # [hidden] float32
    question: Tensor  # [width, hidden] float32
    place: Tensor

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, named: RelevanceHead, hidden: int, device: torch.device, *, dummy: bool
    ) -> "Head":
        shapes = {
            "relevance_norm.weight": (hidden,),
            "question.weight": (named.width, hidden),
            "place.weight": (named.width, hidden),
        }
        generator = torch.Generator().manual_seed(0)
        if dummy:
            found = {
                name: torch.randn(shape, generator=generator) / hidden**0.5 for name, shape in shapes.items()
            }
        else:
            found = _read(checkpoint, named.file, shapes)
        norm, question, place = (found[name].to(device, torch.float32) for name in shapes)
        return cls(named.layer, norm, question, place)

    def normed(self, states: Tensor) -> Tensor:
        x = states.float()
        return x * (x.square().mean(-1, keepdim=True) + HEAD_EPS).rsqrt() * self.norm


def _read(checkpoint: Checkpoint, file: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    try:
        with safe_open(checkpoint.path / file, framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}, which config.json names, cannot be read: {error}") from error
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(f"{file}: {name} is {tuple(found[name].shape)}; the model needs {shape}")
    return found


def compared(depth: int) -> tuple[int, ...]:
    """The layers whose queries and keys are compared, of a decoder of so many and without a head."""
    return tuple(dict.fromkeys(min(int(depth * part), depth - 1) for part in MIDDLE))


def layers_needed(head: RelevanceHead | None, depth: int) -> int:
    """Layers that a question passes before it can look: those below its head, or below the last whose queries
    are compared. The keys are there."""
    return compared(depth)[-1] if head is None else head.layer


class Wanted(NamedTuple):
    """A look to be taken."""

    sight: RelevanceTarget
    table: Tensor  # [blocks] int32, of its row
    question: Tensor  # [width] for a head; [layers, heads, dim] for attention

    @property
    def tokens(self) -> int:
        return self.sight.span.view.tokens


class Lookout:
    def __init__(
        self,
        model: LanguageModel,
        pages: Pages,
        head: Head | None,
        device: torch.device,
        upload: Callable[[Pixels, bytes], Tensor],  # pixels, and of which picture
        stills: Stills | None = None,
    ) -> None:
        depth = len(pages.group.layers)
        if head is not None and (head.layer > depth or pages.side is None):
            raise CheckpointError(
                f"config.json: saccade.relevance has layer {head.layer}; the decoder has {depth} layers"
            )
        self._model = model
        self._pages = pages
        self._head = head
        self._device = device
        self._upload = upload
        self._stills = stills if stills is not None else Stills(device, None, mode=model.mode)
        # What pictures say by themselves is computed here, beside towers and steps.
        self._beside_given_zooms = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._layers = compared(depth)
        self.depth = self._layers[-1] if head is None else head.layer  # layers a question passes to look
        # By view key: the maps that do not depend on the question, least recently used first.
        self._still: OrderedDict[bytes, ByItself] = OrderedDict()
        self._kept = 0  # tokens of their views

    @property
    def watched(self) -> tuple[int, ...]:
        """Layers before which a question's last state is needed; none with a head, which needs more."""
        return () if self._head is not None else self._layers

    @property
    def watches_views(self) -> bool:
        """Whether every token of a view must leave something, not only the ends of questions."""
        return self._head is not None

    def expect(self, rows: Sequence[ScheduledSequence]) -> None:
        """Before a step that looks: what its pictures say by themselves is on its way meanwhile."""
        for sight in [sight for row in rows for sight in row.relevance_targets if sight.keep]:
            self._by_itself(sight)

    def concerns(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether a step of these rows needs `watch`. A head needs every token of a view, too."""
        return any(row.relevance_targets or (row.spans and self.watches_views) for row in rows)

    def watch(self, rows: Sequence[ScheduledSequence]) -> HiddenStateTap:
        """The hidden states the forward pass of these rows must keep: of view tokens (with a head), then of
        the last token of each question."""
        starts = accumulate((row.num_tokens for row in rows), initial=0)
        last = [
            start + row.num_tokens - 1
            for start, row in zip(starts, rows, strict=False)
            if row.relevance_targets
        ]
        if self._head is None:
            return HiddenStateTap(dict.fromkeys(self._layers, self._index(last)))
        views = [np.arange(place, place + count) for _, _, count, place in visual_slices(rows)]
        wanted = self._index(np.concatenate([*views, np.array(last, dtype=np.int64)]))
        return HiddenStateTap({self._head.layer: wanted})

    def after_forward(
        self, rows: Sequence[ScheduledSequence], positions: Tensor, paged: Paged, watch: HiddenStateTap
    ) -> HostLooks | None:
        """After an ordinary forward pass: store vectors of its view tokens, then compute the relevance."""
        states = [watch.states[layer] for layer in watch.tokens]
        tokens = next(iter(watch.tokens.values()))
        asking = [i for i, row in enumerate(rows) if row.relevance_targets]
        views = len(tokens) - len(asking)
        if views:
            self._store_view_vectors(states[0][:views], paged.slots[tokens[:views]])
        if not asking:
            return None
        ends = [state[views:] for state in states]
        tables = [paged.tables[i] for i in asking]
        return self.compute([rows[i] for i in asking], ends, positions[:, tokens[views:]], tables)

    def compute(
        self,
        rows: Sequence[ScheduledSequence],
        states: Sequence[Tensor],
        positions: Tensor,
        tables: Sequence[Tensor],
    ) -> HostLooks:
        """The relevance of the rows with targets, from the KV cache after the step and the hidden states of
        each row's last token: per watched layer [n, hidden], at positions [3, n]; line i belongs to row i,
        further lines are padding. `tables`: the rows' block tables."""
        questions = self._questions(states, positions)
        lines = enumerate(zip(rows, tables, strict=True))
        return self._looks(
            [(row, table, questions[..., i, :]) for i, (row, table) in lines if row.relevance_targets]
        )

    def _looks(self, asking: Sequence[tuple[ScheduledSequence, Tensor, Tensor]]) -> HostLooks:
        """Of rows with sights: each with its block table and its question. Views of equally many tokens are
        coupled together: a look is many small kernels, and some dozens of requests may look in one step."""
        wanted = [Wanted(sight, *other) for row, *other in asking for sight in row.relevance_targets]
        together = 1 if self._model.mode.deterministic else TOGETHER
        coupled: dict[int, tuple[Tensor, Tensor]] = {}
        for tokens in {one.tokens for one in wanted}:
            alike = [number for number, one in enumerate(wanted) if one.tokens == tokens]
            for first in range(0, len(alike), together):
                some = alike[first : first + together]
                shares, strengths = self._couple([wanted[number] for number in some])
                coupled |= zip(some, zip(shares, strengths, strict=True), strict=True)
        looks, parts, size = [], [], 0
        for number, one in enumerate(wanted):
            share, strength = coupled[number]
            image_maps = self._by_itself(one.sight)
            looks.append(Seen(one.sight.span.view.token_grid, image_maps, size, size + one.tokens))
            parts += [share.reshape(-1), strength.reshape(-1)]
            size += one.tokens + 1
        each = iter(looks)
        told = Sent(torch.cat(parts))
        return HostLooks(told, tuple(tuple(islice(each, len(row.relevance_targets))) for row, _, _ in asking))

    def _store_view_vectors(self, states: Tensor, slots: Tensor) -> None:
        if self._head is None or self._pages.side is None:
            raise RuntimeError("only a relevance head stores vectors of view tokens")
        side = self._pages.side.flatten(0, 2)  # [slots, width]
        side.index_copy_(0, slots, (self._head.normed(states) @ self._head.place.T).to(side.dtype))

    def _questions(self, states: Sequence[Tensor], positions: Tensor) -> Tensor:
        """[n, width] with a head; [layers, heads, n, dim] without."""
        if self._head is not None:
            return self._head.normed(states[0]) @ self._head.question.T
        return self._queries(states, positions)

    def _queries(self, states: Sequence[Tensor], positions: Tensor) -> Tensor:
        """Of the questions' last tokens, from their streams: [layers, heads, questions, dim]. In the
        deterministic mode each by itself: how many there are depends on who else asks."""
        if self._model.mode.deterministic and len(states[0]) > 1:
            ones = [slice(i, i + 1) for i in range(len(states[0]))]
            return torch.cat([self._queries([x[one] for x in states], positions[:, one]) for one in ones], 2)
        parts = zip(self._layers, states, strict=True)
        return torch.stack([self._model.queries(layer, x, positions) for layer, x in parts]).transpose(1, 2)

    def _keys(self, slots: Tensor) -> Tensor:
        """What the middle layers have at slots [views, tokens]: [views, layers, tokens, kv_heads, dim]."""
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

    def _couple(self, wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
        """How questions take hold of views of equally many tokens: [views, tokens], [views]."""
        questions = torch.stack([one.question for one in wanted])
        slots = self._slots(wanted)
        if self._head is None:
            return from_attention(questions[:, :, None], self._keys(slots))
        if self._pages.side is None:
            raise RuntimeError("a head needs side pages")
        side = self._pages.side.flatten(0, 2).index_select(0, slots.flatten())
        return from_head(questions, side.view(*slots.shape, -1))

    def _by_itself(self, sight: RelevanceTarget) -> ByItself:
        """What a picture says without a question."""
        key = sight.span.key
        known = self._still.get(key)
        if known is not None:
            self._still.move_to_end(key)
            return known
        view = sight.span.view
        image_maps = self._ask(self._upload(sight.pixels, view.content)[0], view)
        if sight.keep:
            self._keep(key, image_maps)
        return image_maps

    def _ask(self, picture: Tensor, view: View) -> ByItself:
        """A picture has one frame; what a zoomed view would be cut from is all of it."""
        if self._beside_given_zooms is None:
            return ByItself(view.content, view.token_grid, self._stills.maps(picture, view.token_grid))
        self._beside_given_zooms.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside_given_zooms):
            image_maps = ByItself(view.content, view.token_grid, self._stills.maps(picture, view.token_grid))
        picture.record_stream(self._beside_given_zooms)
        return image_maps

    def _keep(self, key: bytes, image_maps: ByItself) -> None:
        self._still[key] = image_maps
        self._kept += image_maps.tokens
        while self._kept > STILLS:
            self._kept -= self._still.popitem(last=False)[1].tokens

    def forget(self, content: bytes) -> None:
        """A picture was deleted."""
        for key in [key for key, image_maps in self._still.items() if image_maps.content == content]:
            self._kept -= self._still.pop(key).tokens

    def _slots(self, wanted: Sequence[Wanted]) -> Tensor:
        """Where the tokens of views lie in the pages, by the block tables of their rows: [views, tokens]."""
        size = self._pages.block_size
        starts = self._index([one.sight.span.start for one in wanted])
        index = starts[:, None] + torch.arange(wanted[0].tokens, device=self._device)
        tables = torch.stack([one.table for one in wanted])
        return tables.gather(1, index // size).long() * size + index % size

    def _index(self, values: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        host = torch.from_numpy(np.asarray(values, dtype=np.int64))
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
