"""The YAML file that describes a simulation: reads and validates it. The package's own scenarios are in `scenarios/`.

All times are seconds; throughputs are blocks/s or tokens/s as in `swarm.data_structures`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.common.files import yaml_file
from swarm.errors import ScenarioError
from swarm.server.placement.move_decision import MovePolicy

_SCENARIO_FOLDER = resources.files("swarm.planning.simulation") / "scenarios"
MAX_SERVERS = 20_000
MAX_MOVE_CHECKS = 20_000_000
"""Limit on the servers' checks for moves in one simulation: each takes microseconds."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
Interval = Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVERS)]
Blocks = Annotated[int, msgspec.Meta(ge=1, le=2048)]
Text = Annotated[str, msgspec.Meta(max_length=400)]


class ServerPopulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution from which the properties of each server are drawn.

    Attributes:
        throughput: blocks/s of the median server.
        spread: standard deviation of the logarithm of the throughput; 0 for equal servers.
        blocks: fewest and most blocks that a server holds; all numbers in this range are equally likely.
        pinned: fraction of the servers that never move, as if started with `--blocks`.
        disk: bytes/s at which the median server loads weights; varies with half the spread.
    """

    throughput: Positive = 100.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.5
    blocks: tuple[Blocks, Blocks] = (4, 12)
    pinned: Fraction = 0.0
    disk: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 1e9


class JoinEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """`servers` servers join at random times within `over` seconds from `at`."""

    servers: Count
    at: Seconds = 0.0
    over: Seconds = 0.0


class LeaveEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """All servers that hold one of the `blocks` [first, end) leave at once; `silently` as after a power cut."""

    at: Seconds
    blocks: tuple[int, Blocks]
    silently: bool = False


class ChurnEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="churn"):
    """From `at` to `until`, the fraction `hourly` of the servers leaves each hour, and another server joins for each.

    `silently` is the fraction of the leaving servers that leave without an announcement.
    """

    at: Seconds
    until: Seconds
    hourly: Fraction
    silently: Fraction = 0.0


class LieEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="lie"):
    """Servers join that announce `announced` blocks/s, are no faster than others, and never move."""

    at: Seconds
    announced: Positive = 1e9
    servers: Count = 1


ScenarioEvent = JoinEvent | LeaveEvent | ChurnEvent | LieEvent


class PolicyOverrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `swarm.server.placement.move_decision.MovePolicy` that a scenario may change."""

    min_gain: Fraction = MovePolicy.min_gain
    cool_down: Seconds = MovePolicy.cool_down
    load_seconds: Seconds = MovePolicy.load_seconds
    horizon: Seconds = MovePolicy.horizon
    max_moves: Annotated[int, msgspec.Meta(ge=0, le=1000)] = MovePolicy.max_moves


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        blocks: number of blocks of the model.
        duration: simulated time.
        steady_from: beginning of the steady state, for the statistics.
        block_bytes: size of one block's weights; with the disk's speed it determines how long a server loads.
        update_period: time between two announcements, and between two checks for moves, of a server.
        record_periods: an announcement that is not renewed remains visible for this many update periods.
        visible_every: a change becomes visible to others at the next multiple of this.
        sample_every: time between two samples.
        route_every: time between two routes that clients plan; 0 for no clients.
    """

    description: Text
    blocks: Blocks
    duration: Annotated[float, msgspec.Meta(ge=1, le=30 * 86400)]
    events: Annotated[tuple[ScenarioEvent, ...], msgspec.Meta(max_length=1000)]
    machines: ServerPopulation = ServerPopulation()
    rules: PolicyOverrides = PolicyOverrides()
    steady_from: Seconds = 0.0
    block_bytes: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 8e8
    update_period: Interval = 30.0
    record_periods: Annotated[float, msgspec.Meta(ge=1, le=100)] = 2.5
    visible_every: Interval = 1.0
    sample_every: Interval = 10.0
    route_every: Seconds = 60.0
    seed: int = 0

    @property
    def policy(self) -> MovePolicy:
        """The policy by which the servers decide."""
        return MovePolicy(**msgspec.structs.asdict(self.rules), check_period=self.update_period)


def shipped_scenarios() -> dict[str, Scenario]:
    """The package's own scenarios by name."""
    return {name: parse_scenario((_SCENARIO_FOLDER / f"{name}.yaml").read_bytes()) for name in _scenario_names()}


def _scenario_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in _SCENARIO_FOLDER.iterdir() if file.name.endswith(".yaml"))


def find_scenario(name: str) -> Scenario:
    """Read a scenario file, or find the package's own scenario of that name. Raises `ScenarioError`."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in _scenario_names():
            raise ScenarioError(f"no scenario {name!r}; give a .yaml file, or one of {', '.join(_scenario_names())}")
        return parse_scenario((_SCENARIO_FOLDER / f"{name}.yaml").read_bytes())
    return yaml_file.read_file(path, parse_scenario, "scenario", ScenarioError)


def parse_scenario(data: bytes) -> Scenario:
    """Parse and validate the content of a file. Raises `ScenarioError`, which names the field."""
    scenario = yaml_file.parse_yaml(data, Scenario, ScenarioError, strict=False)  # in YAML, 1e9 is a string
    _validate(scenario)
    return scenario


def _validate(scenario: Scenario) -> None:
    fewest, most = scenario.machines.blocks
    if not fewest <= most <= scenario.blocks:
        raise ScenarioError(
            f"machines.blocks: [{fewest}, {most}] is not a valid range for a model of {scenario.blocks} blocks"
        )
    if scenario.steady_from >= scenario.duration:
        raise ScenarioError(f"steady_from: {scenario.steady_from:.0f} is not before the end at {scenario.duration:.0f}")
    for index, event in enumerate(scenario.events):
        if event.at > scenario.duration:
            raise ScenarioError(f"events[{index}].at: {event.at:.0f} is after the end at {scenario.duration:.0f}")
        if isinstance(event, LeaveEvent) and not 0 <= event.blocks[0] < event.blocks[1] <= scenario.blocks:
            raise ScenarioError(
                f"events[{index}].blocks: {list(event.blocks)} is not a valid range of {scenario.blocks} blocks"
            )
    _validate_size(scenario)


def _validate_size(scenario: Scenario) -> None:
    servers = sum(event.servers for event in scenario.events if isinstance(event, JoinEvent | LieEvent))
    if servers > MAX_SERVERS:
        raise ScenarioError(f"events: {servers} servers join; at most {MAX_SERVERS} can be simulated")
    churned = sum(e.hourly * max(0.0, e.until - e.at) / 3600 for e in scenario.events if isinstance(e, ChurnEvent))
    if servers * churned > 10 * MAX_SERVERS:
        raise ScenarioError("events: churn replaces more servers than can be simulated; shorten it or lower hourly")
    if servers * scenario.duration / scenario.update_period > MAX_MOVE_CHECKS:
        raise ScenarioError("duration: too long for so many servers; shorten it or lengthen update_period")
    if scenario.duration / min(scenario.sample_every, scenario.route_every or scenario.duration) > 100_000:
        raise ScenarioError("sample_every, route_every: more than 100000 samples; lengthen them")
