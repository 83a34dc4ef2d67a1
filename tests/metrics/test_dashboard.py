"""The dashboard asks for what there is, and is laid out as Grafana wants it; what loads it fits to it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics.instruments import declared, process_metrics

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "swarm.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EVERYWHERE = {"instance", "job", "le"}

_MATCHERS = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_WORD = re.compile(r"\b[a-z_][a-z0-9_]*\b(?!\s*\()")
_OPERATORS = {"or", "and", "unless", "offset", "bool"}


def names(query: str) -> set[str]:
    """Metrics in a PromQL query."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _GROUPING.sub("", query))
    return set(_WORD.findall(bare)) - _OPERATORS


def labels(query: str) -> set[str]:
    """Labels that it selects or groups by."""
    grouped = ",".join(_GROUPING.findall(query)).split(",")
    selected = re.findall(r"(\w+)\s*(?:=|!)", ",".join(_MATCHERS.findall(query)))
    return {label.strip() for label in (*grouped, *selected)} - {""}


def queries() -> list[str]:
    variables = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    asked = [re.fullmatch(r"label_values\((\w+), (\w+)\)", one) for one in variables]
    assert all(asked)
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + [one[1] for one in asked if one]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Labels by the names that a query may hold."""
    found = {sample: set(one.labels) for one in declared() for sample in one.samples}
    return found | {name: set() for name in process_metrics()}


def test_what_is_asked_for_exists(known: dict[str, set[str]]) -> None:
    for query in queries():
        asked = names(query)
        assert asked, query
        assert asked <= known.keys(), query
        assert labels(query) <= set().union(EVERYWHERE, *(known[name] for name in asked)), query
        assert query.count("(") == query.count(")"), query


def test_counters_are_asked_for_their_rate() -> None:
    """What they have reached since some start says nothing."""
    for query in queries():
        for name in names(query):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert re.search(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[", query), query


def test_every_subject_is_on_the_dashboard() -> None:
    """Each thing that is counted is worth a look, but for what is in other figures already."""
    shown = set().union(*map(names, queries()))
    left_out = {one.name for one in declared() if not shown & set(one.samples)}
    assert left_out == {
        "swarm_build_info",
        "swarm_gateway_request_seconds",
    }


def test_grafana_has_what_it_needs() -> None:
    assert DASHBOARD["uid"] == "swarm"
    assert DASHBOARD["title"]
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert DASHBOARD["schemaVersion"] >= 36  # since then a data source is named by an object
    assert "id" not in DASHBOARD, "ids are a database's own"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in PANELS:
        assert panel["title"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


def read(*path: str) -> Any:
    return yaml.safe_load(DOCKER.joinpath(*path).read_text())


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    [source] = read("grafana", "provisioning", "datasources", "prometheus.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    [provider] = read("grafana", "provisioning", "dashboards", "swarm.yaml")["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")
    interval = read("prometheus", "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_prometheus_reads_everybody() -> None:
    jobs = read("prometheus", "prometheus.yml")["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["swarm-gateway", "swarm-servers", "swarm-bootstrap"]
    targets = [target for job in jobs for static in job["static_configs"] for target in static["targets"]]
    assert all(re.fullmatch(r"[a-z0-9-]+:\d+", target) for target in targets)
    assert len(set(targets)) == len(targets) == 5
