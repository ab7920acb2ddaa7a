"""Alert rules and dashboard use only exported metrics and labels."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.exposed import OPEN, metrics_text, series

DEPLOY = Path(__file__).parent.parent / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "saccade.json").read_text())
SCRAPED = {"job", "instance"}  # labels Prometheus adds
VARIABLES = {"$__rate_interval": "5m", "$job": "saccade", "$instance": ".*"}
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def faults(query: str) -> list[str]:
    """Names in a query that are not exported, and counters read without a range."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    known, found = series(), []
    labels = set(SCRAPED) | {"le"}
    for match in re.finditer(r"\b(saccade_\w+)(?:\{([^}]*)\})?(\[)?", query):
        name, matchers, ranged = match.groups()
        if name not in known:
            found.append(f"{name} is not exported")
            continue
        one = known[name]
        labels |= set(one.values)
        if (one.kind != "gauge") != bool(ranged):
            found.append(f"{name} is a {one.kind}: only those that grow are read over a range")
        for label, how, value in re.findall(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"', matchers or ""):
            if label not in {*one.values, *SCRAPED}:
                found.append(f"{name} has no label {label}")
            elif how in ("=", "!=") and label not in SCRAPED | OPEN and value not in one.values[label]:
                found.append(f"{name} has no {label} {value!r}")
    for grouped in re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", query):
        found += [f"no metric of it has {one}" for one in re.findall(r"\w+", grouped) if one not in labels]
    if query.count("(") != query.count(")") or query.count("{") != query.count("}"):
        found.append("its brackets do not match")
    return found


@pytest.mark.parametrize(("where", "query"), expressions(), ids=lambda value: str(value)[:40])
def test_queries_use_exported_metrics(where: str, query: str) -> None:
    assert "saccade_" in query or "up{" in query
    assert faults(query) == []


@pytest.mark.parametrize(
    "query",
    [
        "saccade_nothing",
        'saccade_requests{state="sleeping"}',
        'saccade_requests{colour="red"}',
        "saccade_preemptions_total > 3",
        "rate(saccade_requests[5m])",
        "sum by (colour) (saccade_requests)",
        "sum(saccade_requests",
        "saccade_time_to_first_token_seconds > 1",
    ],
)
def test_a_wrong_query_is_detected(query: str) -> None:
    assert faults(query)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    recorded = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_severity_and_description() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+m", rule["for"])
        text = rule["annotations"]["summary"] + rule["annotations"]["description"]
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= SCRAPED  # what every expression keeps


def test_panels_do_not_overlap_and_have_a_source() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["description"]
        for target in panel["targets"]:
            assert (
                target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            )
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "job", "instance"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command",
    ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml", "check metrics"],
)
def test_promtool_accepts(command: str) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *command.split()],
        cwd=DEPLOY / "prometheus",
        input=metrics_text(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
