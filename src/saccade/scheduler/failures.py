"""Whom a failure of the device hits: everybody in a step that cannot be run, or those who need a view.

takes   steps that failed, or views of one that could not be made
gives   the requests to be ended, and what each is told
never   ends one itself
"""

from collections.abc import Mapping

from saccade.errors import EncodingFailed
from saccade.scheduler.kv_manager import Holdings
from saccade.scheduler.sequence import Group, slot_of
from saccade.scheduler.step_builder import Step

CODE = EncodingFailed.code


def hit_by_step(step: Step, message: str, holdings: Holdings) -> dict[str, str]:
    """Of a step that could not be run, or whose result could not be had: the requests in it, and those who
    wait for its views. What it was to copy to the host is not there."""
    touched = [*step.arriving, *(sequence for sequence, _, _ in step.planned)]
    groups = [sequence.group for sequence in touched if not sequence.ended]
    groups += holdings.making.failed(step.views)
    holdings.swapping.space.fail(step.swap_outs)
    return {group.request.id: message for group in groups}


def hit_by_views(step: Step, failed: Mapping[bytes, str], holdings: Holdings) -> dict[str, str]:
    """Of views that could not be made (by key: why): the requests that came to one in this step, and what
    they are told. Those that have it still ahead try again when they come to it."""
    told: dict[str, str] = {}
    holdings.making.give_up(failed)
    for key, why in failed.items():
        reading = [one.group for one, _, row in step.planned if any(span.key == key for span in row.spans)]
        for group in (*step.asked[key], *reading):
            told.setdefault(group.request.id, _excuse(group, key, why))
    return told


def _excuse(group: Group, key: bytes, why: str) -> str:
    media = sorted(group.request.media, key=lambda item: item.placeholder)
    slots = [item.placeholder for item in media if item.origin is None]
    slot = next(slot_of(item) for item in media if item.view.key == key)
    frames, height, width, _ = group.pixels[key].shape
    kind = "picture" if frames == 1 else "video frame"
    name = f"{kind} {slots.index(slot) + 1} of this request ({width}x{height} pixels)"
    return f"{name} could not be encoded: {why}; try again, or send it smaller"
