"""Reads the `saccade` section of config.json: which views a checkpoint accepts, and its relevance head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from saccade.checkpoint import Checkpoint
from saccade.errors import CheckpointError
from saccade.lod.types import LADDER, Grid, ViewRule

TRAINED_VIEWS = 2  # default number of zoomed views per image for a checkpoint trained with them


class RelevanceHead(msgspec.Struct, frozen=True):
    """A learned relevance head; its weights are in a file of the checkpoint's folder."""

    file: Annotated[str, Meta(pattern=r"^[^/\\]+\.safetensors$")]
    layer: Annotated[int, Meta(ge=1)]  # decoder layers below it
    width: Annotated[int, Meta(ge=1)]  # of the vectors it compares


class _Views(msgspec.Struct, frozen=True):
    trained: bool = False
    positions: Literal["stock", "registered"] = "stock"
    placement: Literal["after_question"] = "after_question"
    global_tokens: tuple[int, int] = ViewRule().global_tokens
    zoom_tokens: tuple[int, ...] = LADDER
    zoom_grids: tuple[Grid, ...] = ()
    most_views: int = TRAINED_VIEWS


class _Section(msgspec.Struct, frozen=True):
    views: _Views | None = None
    relevance: RelevanceHead | None = None


@dataclass(frozen=True)
class CheckpointViews:
    rule: ViewRule
    trained: bool  # with a global view and zoomed views after the question
    registered: bool  # zoomed views have positions inside the whole image
    head: RelevanceHead | None


def checkpoint_views(checkpoint: Checkpoint) -> CheckpointViews:
    unit = ViewRule().unit if checkpoint.image is None else checkpoint.image.factor
    return read_views(checkpoint.config, unit)


def read_views(config: Mapping[str, Any], unit: int) -> CheckpointViews:
    try:
        section = msgspec.convert(config.get("saccade") or {}, _Section)
        views = section.views
        if views is None:
            return CheckpointViews(ViewRule(unit=unit), False, False, section.relevance)
        rule = ViewRule(
            global_tokens=views.global_tokens,
            zoom_tokens=tuple(level for level in views.zoom_tokens if level in LADDER),
            square=all(rows == columns for rows, columns in views.zoom_grids),
            most_views=views.most_views,
            unit=unit,
        )
    except ValueError as error:  # msgspec.ValidationError is one
        raise CheckpointError(f"config.json: saccade: {error}") from error
    return CheckpointViews(rule, views.trained, views.positions == "registered", section.relevance)
