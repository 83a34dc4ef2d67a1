"""The example of the documentation is a scenario."""

from __future__ import annotations

from pathlib import Path

from swarm.planning.simulation.scenario import parse_scenario, shipped_scenarios

PAGE = Path(__file__).parents[3] / "docs" / "simulation.md"


def test_the_example_can_be_read() -> None:
    scenario = parse_scenario(PAGE.read_text().split("```yaml\n")[1].split("```")[0].encode())
    assert [type(event).__name__ for event in scenario.events] == ["JoinEvent", "LeaveEvent", "ChurnEvent", "LieEvent"]


def test_every_shipped_scenario_is_listed() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert set(shipped_scenarios()) <= set(rows)
