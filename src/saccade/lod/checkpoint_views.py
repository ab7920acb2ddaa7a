"""Reads the `saccade` section of config.json: which views a checkpoint accepts, and its relevance head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.checkpoint import Checkpoint
from saccade.errors import CheckpointError
from saccade.lod.types import LADDER, ViewRule

TRAINED_VIEWS = 2  # default number of zoomed views per image for a checkpoint trained with them


@dataclass(frozen=True)
class RelevanceHead:
    """A learned relevance head; its weights are in a file of the checkpoint's folder."""

    file: str
    layer: int  # decoder layers below it
    width: int  # of the vectors it compares


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
    section = _section(config, "saccade")
    views, head = _section(section, "views"), _section(section, "relevance")
    if not views:
        return CheckpointViews(ViewRule(unit=unit), trained=False, registered=False, head=_head(head))
    positions = views.get("positions", "stock")
    if positions not in ("stock", "registered"):
        raise CheckpointError(f"config.json: saccade.views.positions is {positions!r}; stock or registered")
    placement = views.get("placement", "after_question")
    if placement != "after_question":
        raise CheckpointError(
            f"config.json: saccade.views.placement is {placement!r}; only after_question is implemented"
        )
    return CheckpointViews(
        _rule(views, unit), bool(views.get("trained")), positions == "registered", _head(head)
    )


def _rule(views: Mapping[str, Any], unit: int) -> ViewRule:
    plain = ViewRule(unit=unit)
    bounds = _numbers(views, "global_tokens", plain.global_tokens)
    levels = _numbers(views, "zoom_tokens", plain.zoom_tokens)
    grids = views.get("zoom_grids")
    most = views.get("most_views", TRAINED_VIEWS)
    if len(bounds) != 2 or not isinstance(most, int):
        raise CheckpointError(
            f"config.json: saccade.views.global_tokens is {views.get('global_tokens')!r} and most_views "
            f"{most!r}; fewest and most tokens, and a whole number are needed"
        )
    try:
        return ViewRule(
            global_tokens=(bounds[0], bounds[1]),
            zoom_tokens=tuple(level for level in levels if level in LADDER),
            square=not grids or all(rows == columns for rows, columns in grids),
            most_views=most,
            unit=unit,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: saccade.views: {error}") from error


def _head(section: Mapping[str, Any]) -> RelevanceHead | None:
    if not section:
        return None
    file, layer, width = (section.get(key) for key in ("file", "layer", "width"))
    named = isinstance(file, str) and file.endswith(".safetensors") and "/" not in file and "\\" not in file
    if not named or not isinstance(layer, int) or not isinstance(width, int) or min(layer, width) < 1:
        raise CheckpointError(
            f"config.json: saccade.relevance has file {file!r}, layer {layer!r} and width {width!r}; the "
            "name of a safetensors file in the folder and two whole numbers are needed"
        )
    return RelevanceHead(str(file), layer, width)


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = config.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _numbers(views: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    given = views.get(key, default)
    if not isinstance(given, list | tuple) or not all(isinstance(one, int) for one in given):
        raise CheckpointError(f"config.json: saccade.views.{key} is {given!r}; whole numbers are needed")
    return tuple(given)
