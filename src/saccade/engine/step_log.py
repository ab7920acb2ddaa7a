"""The step log (`--step-log`): a JSON line per step with its work, expected time and measured time.

It answers why a token was late. `python -m bench.step_costs` compares expected and measured times.
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
        self._last = self._began  # begin of the interval being measured
        self._plan_ms = 0.0

    def planning_started(self) -> None:
        self._last = time.perf_counter()

    def planned(self) -> None:
        self._plan_ms = self._elapsed_ms()

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
            "launch_ms": self._elapsed_ms(),
        }

    def finished(self, plan: StepPlan, seconds: float | None) -> None:
        """`seconds`: its time; None where that counts to the next step."""
        for number in [number for number in self._launched if number < plan.number]:
            del self._launched[number]  # outputs come in order: this step failed
        line = self._launched.pop(plan.number, None)
        if line is None or self._file.closed:
            return
        took = None if seconds is None else round(1e3 * seconds, 3)
        try:
            self._file.write(json.dumps({**line, "ms": took, "wait_ms": self._elapsed_ms()}) + "\n")
        except OSError as error:
            log.warning("the step log %s ends here, it cannot be written: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _elapsed_ms(self) -> float:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        return round(1e3 * took, 3)
