"""docs/metrics.md names every instrument, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.metrics.instruments import declared, process_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels by name."""
    rows = ROW.findall(PAGE)
    assert len({row[0] for row in rows}) == len(rows), "a metric stands there twice"
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


def test_every_metric_is_documented_as_it_is() -> None:
    told = documented()
    assert set(told) == {one.name for one in declared()}
    for one in declared():
        kind, labels = told[one.name]
        assert kind == one.type, one.name
        if not one.name.endswith("_info"):
            assert labels == one.labels, one.name


def test_names_follow_the_conventions() -> None:
    for one in declared():
        assert one.name.startswith("swarm_")
        assert (one.type == "counter") == one.name.endswith("_total")
        if one.type == "histogram":
            assert one.name.endswith(("_seconds", "_tokens", "_sequences"))


def test_what_is_said_of_processes_is_there() -> None:
    named = set(re.findall(r"`(process_\w+)`", PAGE))
    assert named
    assert named <= process_metrics()
