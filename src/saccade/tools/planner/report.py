"""What a plan says, as a table for people and as JSON for programs.

takes   fits and an outcome
gives   rows of text and numbers
never   computes anything but percentiles
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from saccade.kv_cache.pool_sizing import PoolSizes
from saccade.scheduler.cost_model import Coefficients
from saccade.scheduler.cost_prior import Network
from saccade.tools.planner.capacity import Fit
from saccade.tools.planner.play import Outcome, Waits


@dataclass(frozen=True)
class Report:
    network: Network
    pool_bytes: int
    shares: PoolSizes
    costs: Coefficients
    source: str  # where the costs are from
    fits: Sequence[Fit]
    outcome: Outcome | None  # None: nothing was played

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kv_bytes_per_token": self.network.kv_bytes,
            "weight_bytes": self.network.weight_bytes,
            "kv_pool_bytes": self.pool_bytes,
            "kv_blocks": self.shares.blocks,
            "kv_vision_blocks": self.shares.vision,
            "kv_compact_blocks": self.shares.compact,
            "costs_ms": asdict(self.costs),
            "costs_from": self.source,
            "kinds": {fit.kind: asdict(fit) for fit in self.fits},
        }
        if self.outcome is not None:
            found["played"] = _played(self.outcome)
            for name, waits in self.outcome.kinds.items():
                found["kinds"][name]["waits_ms"] = _waits(waits)
        return found

    def show(self, console: Console) -> None:
        per_token = f"{self.network.kv_bytes / 1e3:,.1f} kB of KV per token{self._views()}"
        console.print(f"{per_token}, {self.pool_bytes / 1e9:,.1f} GB of it; costs: {self.source}")
        console.print(self._capacity())
        if self.outcome is None:
            return
        console.print(_times(self.outcome))
        played = _played(self.outcome)
        blocks = played["peak_blocks"] / max(self.shares.blocks, 1)
        console.print(
            f"{played['seconds']:,.1f} s played in {played['steps']:,} steps, device busy "
            f"{played['busy']:.0%}, at most {played['peak_rows']:,} rows and {blocks:.0%} of the KV blocks, "
            f"{played['preemptions']:,} preemptions ({played['swapped_blocks']:,} blocks came back from host "
            f"memory); requests waited for: {played['binds']}"
        )

    def _views(self) -> str:
        """Where views have a pool of their own, what it is."""
        if not self.shares.vision:
            return ""
        small = self.shares.compact == self.shares.vision and not self.network.small
        per_token = self.network.small_kv_bytes if small else self.network.kv_bytes
        return f" ({per_token / 1e3:,.1f} of a picture, {self.shares.vision:,} of the blocks)"

    def _capacity(self) -> Table:
        table = Table(title="How many fit, were there no other kind")
        for name in ("kind", "tokens", "of them visual", "KV MB", "concurrent", "in whole blocks", "limit"):
            table.add_column(name, justify="left" if name in ("kind", "limit") else "right")
        for fit in self.fits:
            table.add_row(
                fit.kind,
                f"{fit.tokens:,}",
                f"{fit.visual_tokens:,}",
                f"{fit.bytes / 1e6:,.1f}",
                f"{fit.concurrent:,.0f}",
                f"{fit.whole:,}",
                fit.binds,
            )
        return table


def _times(outcome: Outcome) -> Table:
    table = Table(title="Waits to expect, ms")
    for name in ("kind", "requests", "refused"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for name in ("first token", "between tokens", "whole answer"):
        for percentile in ("p50", "p99"):
            table.add_column(f"{name} {percentile}", justify="right")
    for kind, waits in outcome.kinds.items():
        numbers = _waits(waits)
        cells = [
            "-" if value is None else f"{value:,.1f}"
            for part in ("first", "between", "whole")
            for value in (numbers[f"{part}_p50"], numbers[f"{part}_p99"])
        ]
        table.add_row(kind, f"{numbers['requests']:,}", f"{numbers['refused']:,}", *cells)
    return table


def _waits(waits: Waits) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(waits.whole), "refused": waits.refused}
    for part, seconds in (("first", waits.first), ("between", waits.between), ("whole", waits.whole)):
        for percentile in (50, 99):
            value = float(np.percentile(seconds, percentile)) * 1e3 if len(seconds) else None
            found[f"{part}_p{percentile}"] = value
    return found


def _played(outcome: Outcome) -> dict[str, Any]:
    stats = outcome.stats
    return {
        "seconds": outcome.seconds,
        "steps": stats.steps,
        "busy": outcome.busy / outcome.seconds if outcome.seconds else 0.0,
        "peak_rows": outcome.peak_rows,
        "peak_blocks": outcome.peak_blocks,
        "preemptions": stats.preemptions,
        "swapped_blocks": stats.swap_in_blocks,
        "encodes": stats.encodes,
        "generated_tokens": stats.generated_tokens,
        "prediction_error": stats.step_error,
        "short_of_steps": dict(outcome.short_of),
        "binds": outcome.binds,
    }
