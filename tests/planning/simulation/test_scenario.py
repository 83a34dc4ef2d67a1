from __future__ import annotations

import pytest

from swarm.errors import ScenarioError, UsageError
from swarm.planning.simulation.scenario import JoinEvent, find_scenario, parse_scenario, shipped_scenarios

SMALL = b"""
description: a few servers
blocks: 16
duration: 600
events: [{type: join, servers: 4}]
"""


def test_a_small_scenario():
    scenario = parse_scenario(SMALL)
    assert scenario.events == (JoinEvent(servers=4),)
    assert scenario.policy.check_period == scenario.update_period


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("blocks: 16", "blocks: 0", "blocks"),
        ("blocks: 16", "blocks: many", "blocks"),
        ("blocks: 16", "block: 8", "block"),
        ("duration: 600", "duration: .inf", "duration"),
        ("duration: 600", "duration: .nan", "duration"),
        ("servers: 4", "servers: -1", "events[0].servers"),
        ("servers: 4", "servers: 1000000", "events[0].servers"),
        ("servers: 4", "servers: 4, at: 601", "events[0].at"),
        ("type: join", "type: arrive", "events[0]"),
        ("type: join, servers: 4", "type: leave, at: 1, blocks: [4, 17]", "events[0].blocks"),
        ("type: join, servers: 4", "type: leave, at: 1, blocks: [4, 4]", "events[0].blocks"),
        ("blocks: 16", "blocks: 16\nmachines: {blocks: [3, 17]}", "machines.blocks"),
        ("blocks: 16", "blocks: 16\nmachines: {blocks: [3, 2]}", "machines.blocks"),
        ("blocks: 16", "blocks: 16\nmachines: {pinned: 2}", "machines.pinned"),
        ("blocks: 16", "blocks: 16\nrules: {patience: 2}", "patience"),
        ("blocks: 16", "blocks: 16\nsteady_from: 600", "steady_from"),
        ("duration: 600", "duration: 2000000\nupdate_period: 0.1", "duration"),
        ("duration: 600", "duration: 2000000\nsample_every: 1", "sample_every"),
        ("servers: 4", "servers: 20000}, {type: join, servers: 1", "events"),
        ("servers: 4", "servers: 20000}, {type: churn, at: 0, until: 1.0e+7, hourly: 1", "events"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(old, new, named):
    assert old in SMALL.decode()
    with pytest.raises(ScenarioError, match=named.replace("[", r"\[").replace("]", r"\]")) as caught:
        parse_scenario(SMALL.decode().replace(old, new).encode())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("data", [b"a: [", b"\xff", b"12", b"", b"[" * 5000, b"!!python/object:os.system {}"])
def test_other_content_is_refused(data):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(data)
    assert "\n" not in str(caught.value)


def test_numbers_with_an_exponent_are_numbers():
    assert parse_scenario(SMALL.replace(b"blocks: 16", b"blocks: 16\nblock_bytes: 1e9")).block_bytes == 1e9


def test_every_shipped_scenario_can_be_read():
    assert set(shipped_scenarios()) == {"churn", "growth", "large", "liar", "steady", "stretch-leaves", "unequal"}
    assert all(find_scenario(name) == scenario for name, scenario in shipped_scenarios().items())


def test_files_that_are_not_there_or_too_large_are_named(tmp_path):
    with pytest.raises(ScenarioError, match="steady"):
        find_scenario("nonsense")
    with pytest.raises(ScenarioError, match="cannot be read"):
        find_scenario(str(tmp_path / "missing.yaml"))
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 20) + SMALL)
    with pytest.raises(ScenarioError, match="larger than"):
        find_scenario(str(large))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_bytes(SMALL.replace(b"blocks", b"block"))
    with pytest.raises(ScenarioError, match=r"wrong.yaml: .*block"):
        find_scenario(str(wrong))
