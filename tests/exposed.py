"""What /metrics exports, for tests that compare documents and rules with it."""

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from saccade.metrics import EngineStats, ServerMetrics

OPEN = {
    "outcome",
    "route",
    "status",
    "decoder",
    "vision",
    "head",
}  # labels whose values depend on use or model


@dataclass
class Exposed:
    """One metric as Prometheus sees it; `values` by label."""

    kind: str
    text: str
    values: dict[str, set[str]] = field(default_factory=dict)


def metrics_text() -> str:
    metrics = ServerMetrics(EngineStats)
    metrics.finished.labels("stop").inc()  # labels that appear with use
    metrics.responses.labels("/", "200").inc()
    return metrics.render().decode()


def exposed() -> dict[str, Exposed]:
    """By the name a person looks for: counters with _total, histograms without their endings."""
    found: dict[str, Exposed] = {}
    for family in text_string_to_metric_families(metrics_text()):
        if family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        one = found.setdefault(name, Exposed(family.type, family.documentation))
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    one.values.setdefault(label, set()).add(value)
    return found


def series() -> dict[str, Exposed]:
    """By the name a query uses: histograms by their three endings."""
    found: dict[str, Exposed] = {}
    for name, one in exposed().items():
        endings = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        found |= {name + ending: one for ending in endings}
    return found
