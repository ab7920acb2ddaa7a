"""Runs a model over pages the way the engine does, without the engine: sequences, chunks, shuffled blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Paged, Pages
from saccade.models.interface import DeepStackFeatures, LanguageModel


@dataclass
class Story:
    """One sequence: everything the model is told about each of its tokens."""

    embeds: Tensor  # [N, hidden]
    positions: Tensor  # [3, N]
    levels: Tensor | None = None  # [D, N, hidden]; zero rows where the token is not visual
    visual: Tensor | None = None  # [N] bool
    done: int = 0
    blocks: list[int] = field(default_factory=list)

    def extend(self, embeds: Tensor, positions: Tensor) -> None:
        count = embeds.shape[0]
        self.embeds = torch.cat((self.embeds, embeds))
        self.positions = torch.cat((self.positions, positions), dim=1)
        if self.levels is not None and self.visual is not None:
            self.levels = torch.cat(
                (
                    self.levels,
                    self.levels.new_zeros(len(self.levels), count, 1).expand(-1, -1, self.levels.shape[2]),
                ),
                dim=1,
            )
            self.visual = torch.cat((self.visual, self.visual.new_zeros(count)))


class Walker:
    def __init__(self, model: LanguageModel, blocks: int = 200, block_size: int = 4) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.block_size = block_size
        self.device = parameter.device
        group = single_group(model.kv_cache_groups, block_size)
        self.pages = Pages.allocate(group, blocks, parameter.device)
        # A stray read must be seen: whatever was not written is not a number.
        self.pages.k.fill_(torch.nan)
        self.pages.v.fill_(torch.nan)
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Story, int]]) -> list[Tensor]:
        """Compute the next `count` tokens of each story, decodes first; gives the logits of each."""
        counts = tuple(count for _, count in work)
        contexts = tuple(story.done + count for story, count in work)
        decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        slots: list[int] = []
        for (story, _), context in zip(work, contexts, strict=True):
            while len(story.blocks) * self.block_size < context:
                story.blocks.append(self._free.pop())
            slots += [
                story.blocks[place // self.block_size] * self.block_size + place % self.block_size
                for place in range(story.done, context)
            ]
        width = max(len(story.blocks) for story, _ in work)
        # Entries past a sequence's end lead nowhere, as in the engine after a row was reused.
        tables = [story.blocks + [2**30] * (width - len(story.blocks)) for story, _ in work]
        offsets = [sum(counts[:row]) for row in range(len(counts) + 1)]
        rows = AttentionMetadata(
            torch.tensor(tables, dtype=torch.int32, device=self.device),
            torch.tensor(contexts, dtype=torch.int32, device=self.device),
            torch.tensor(offsets, dtype=torch.int32, device=self.device),
            counts,
            contexts,
            decodes,
            self.block_size,
        )
        paged = Paged(self.pages, torch.tensor(slots, device=self.device), rows)
        spans = [(story, slice(story.done, story.done + count)) for story, count in work]
        embeds = torch.cat([story.embeds[span] for story, span in spans])
        positions = torch.cat([story.positions[:, span] for story, span in spans], dim=1)
        hidden = self.model(embeds, positions, paged, _deep(spans))
        for story, count in work:
            story.done += count
        return list(torch.split(self.model.logits(hidden), list(counts)))

    def run(self, story: Story, chunk: int | None = None) -> Tensor:
        """Everything that is left of one story, in chunks; logits of all of it."""
        parts = []
        while story.done < len(story.embeds):
            left = len(story.embeds) - story.done
            parts += self.step([(story, min(left, chunk or left))])
        return torch.cat(parts)


def _deep(spans: Sequence[tuple[Story, slice]]) -> DeepStackFeatures | None:
    levels, flags = [], []
    for story, span in spans:
        if story.levels is None or story.visual is None:
            return None
        levels.append(story.levels[:, span])
        flags.append(story.visual[span])
    index = torch.cat(flags).nonzero()[:, 0]
    return DeepStackFeatures(index, torch.cat(levels, dim=1)[:, index]) if len(index) else None


def text_story(model: LanguageModel, tokens: Tensor) -> Story:
    places = torch.arange(len(tokens), device=tokens.device)
    return Story(model.embed(tokens), places.expand(3, -1))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
