"""The log of slow requests: one line of JSON each, with where the time went.

takes   a request that is over, however it ended, and its stages
gives   a warning on the logger `saccade.slow`, if it took longer than the limit
never   writes anything of what was asked or answered
"""

import json
import logging
import time

from saccade.request_timing import RequestTiming
from saccade.server.generation import Generation

log = logging.getLogger("saccade.slow")


def note_if_slow(limit: float, name: str, stages: RequestTiming, generation: Generation | None) -> None:
    """`limit` in seconds; 0: nothing is slow."""
    now = time.monotonic()
    if not limit or now - stages.arrived < limit:
        return
    line: dict[str, object] = {"slow_request": name, "ended_in": stages.reached, "finish": None}
    if generation is not None:
        usage = generation.usage
        line |= {
            "finish": sorted({choice.finish_reason or "cancelled" for _, choice in generation.choices}),
            "choices": len(generation.choices),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "visual_tokens": usage.visual_tokens,
            "completion_tokens": usage.completion_tokens,
        }
    if stages.engine is not None:
        line["preempted"] = stages.engine.preempted
    line["seconds"] = {stage: round(value, 4) for stage, value in stages.seconds(now).items()}
    log.warning("%s", json.dumps(line))
