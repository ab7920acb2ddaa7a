"""A line for every step, in a file the user names: what it did, what it was expected to take, what it took.

takes   steps as they are launched and learnt
gives   JSON lines
owns    the file
never   is there unless asked for (`--step-log`); stops the engine: a log that cannot be written ends

For whoever asks why a token came late: the step that held it up stands there with its rows, prompt tokens and
views (patches, and which layers of the tower), whether it ran captured, and how long the host took to plan
and to launch it. `python -m bench.step_costs` says how far expectations were off.
"""

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import TextIO

from saccade.errors import ConfigError
from saccade.scheduler.cost_model import pairs
from saccade.step_plan import StepPlan

log = logging.getLogger(__name__)


class StepLog:
    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO = path.open("w", buffering=1)
        except OSError as error:
            raise ConfigError(f"the step log {path} cannot be written: {error.strerror}") from None
        self._path = path
        self._began = time.perf_counter()
        self._launched: dict[int, dict[str, object]] = {}  # by number: what is known so far
        self._turn = self._began  # when the time not yet written down began
        self._plan_ms = 0.0

    def begin(self) -> None:
        """A turn of the loop begins."""
        self._turn = time.perf_counter()

    def planned(self) -> None:
        """A plan was made; what follows is its launch."""
        self._plan_ms = self._lap()

    def launched(self, plan: StepPlan, *, captured: bool) -> None:
        prompts = [row for row in plan.scheduled if row.num_tokens > 1]
        self._launched[plan.number] = {
            "step": plan.number,
            "at": round(time.perf_counter() - self._began, 5),
            "decodes": len(plan.scheduled) - len(prompts),
            "prompts": len(prompts),
            "tokens": sum(row.num_tokens for row in prompts),
            "context": sum(row.start + 1 for row in plan.scheduled if row.num_tokens == 1),
            "pairs": sum(pairs(row.start, row.num_tokens) for row in prompts),
            "longest": max((row.start + row.num_tokens for row in plan.scheduled), default=0),
            "views": [[encode.patches, encode.first_layer, encode.stop_layer] for encode in plan.encodes],
            "captured": captured,
            "expected_ms": round(plan.expected_ms, 3),
            "plan_ms": self._plan_ms,
            "launch_ms": self._lap(),
        }

    def learnt(self, plan: StepPlan, seconds: float | None) -> None:
        """`seconds`: what it took; None where that is part of the next one's."""
        for number in [number for number in self._launched if number < plan.number]:
            del self._launched[number]  # results come in order: that of this one could not be had
        line = self._launched.pop(plan.number, None)
        if line is None or self._file.closed:
            return
        took = None if seconds is None else round(1e3 * seconds, 3)
        try:
            self._file.write(json.dumps({**line, "ms": took, "wait_ms": self._lap()}) + "\n")
        except OSError as error:
            log.warning("the step log %s ends here, it cannot be written: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is lost, and nothing else
            self._file.close()

    def _lap(self) -> float:
        now = time.perf_counter()
        took, self._turn = now - self._turn, now
        return round(1e3 * took, 3)
