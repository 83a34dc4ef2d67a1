"""Runs a scenario and records samples of what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.data_structures import Route, Span
from swarm.errors import MissingBlocks
from swarm.planning.simulation.ground_truth import CompletedMove, CoverageGap
from swarm.planning.simulation.scenario import Scenario
from swarm.planning.simulation.simulated_swarm import SimulatedSwarm
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import RouteRequirements, route_seconds
from swarm.routing.swarm_snapshot import SwarmSnapshot


@dataclass(frozen=True)
class SwarmSample:
    """The state of the swarm at one moment. Throughputs are true ones, in tokens/s.

    Attributes:
        time: seconds.
        bottleneck: throughput of the weakest block.
        optimum: upper bound on it for any placement of these servers.
        near_liars: throughput of the weakest block that a liar holds; None if there is no liar.
        servers: number of servers that are serving or loading.
        visible: number of announced servers, including those that vanished silently.
        moves: number of moves so far.
        gaps: number of blocks without a server.
    """

    time: float
    bottleneck: float
    optimum: float
    near_liars: float | None
    servers: int
    visible: int
    moves: int
    gaps: int


@dataclass(frozen=True)
class RouteSample:
    """A route that a client planned from the announcements.

    Attributes:
        time: seconds.
        hops: number of hops; 0 if no server announced some block.
        seconds: expected time of a token.
        lost: number of servers on the route that were gone or held other blocks.
    """

    time: float
    hops: int
    seconds: float
    lost: int


@dataclass(frozen=True)
class SimulationResult:
    """Everything that a simulation recorded."""

    scenario: Scenario
    seed: int
    joined: int
    left: int
    samples: tuple[SwarmSample, ...]
    routes: tuple[RouteSample, ...]
    moves: tuple[CompletedMove, ...]
    gaps: tuple[CoverageGap, ...]


def simulate(scenario: Scenario, seed: int | None = None) -> SimulationResult:
    """Run a scenario to its end. The same seed gives the same result; the default is the scenario's own seed."""
    seed = scenario.seed if seed is None else seed
    world = SimulatedSwarm(scenario, seed)
    samples: list[SwarmSample] = []
    routes: list[RouteSample] = []
    _call_every(world, scenario.sample_every, lambda: samples.append(_sample_swarm(world)))
    if scenario.route_every > 0:
        _call_every(world, scenario.route_every, lambda: routes.append(_sample_route(world, scenario.blocks)))
    world.clock.run_until(scenario.duration)
    truth = world.truth
    return SimulationResult(
        scenario, seed, truth.joined, truth.left, tuple(samples), tuple(routes), tuple(truth.moves), truth.all_gaps()
    )


def _call_every(world: SimulatedSwarm, every: float, action: Callable[[], None]) -> None:
    def happen() -> None:
        action()
        world.clock.call_after(every, happen)

    world.clock.call_after(every, happen)


def _sample_swarm(world: SimulatedSwarm) -> SwarmSample:
    truth = world.truth
    world.directory.advance(world.clock.now)
    near_liars = truth.near_liars()
    return SwarmSample(
        time=world.clock.now,
        bottleneck=float(truth.throughputs().min()),
        optimum=truth.optimum,
        near_liars=float(near_liars.min()) if near_liars.size else None,
        servers=truth.servers,
        visible=world.directory.visible,
        moves=len(truth.moves),
        gaps=truth.gaps_now,
    )


def _sample_route(world: SimulatedSwarm, blocks: int) -> RouteSample:
    world.directory.advance(world.clock.now)
    snapshot = SwarmSnapshot(world.directory.online())
    try:
        route = find_route(snapshot, Span(0, blocks))
    except MissingBlocks:
        return RouteSample(world.clock.now, 0, 0.0, 0)
    seconds = route_seconds(snapshot, route, RouteRequirements())
    return RouteSample(world.clock.now, len(route.hops), seconds, _count_lost_servers(world, route))


def _count_lost_servers(world: SimulatedSwarm, route: Route) -> int:
    """Count the servers on the route that do not serve the blocks that it needs from them."""
    serving = {server.peer_id: server.span for server in world.alive.values() if server.serves}
    spans = [(serving.get(hop.server.peer_id), hop.span) for hop in route.hops]
    return sum(span is None or wanted.start not in span or wanted.end - 1 not in span for span, wanted in spans)
