"""Runs a scenario and takes down what happens."""

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
    """The swarm at one moment. Throughputs in tokens/s, true ones.

    Attributes:
        time: seconds.
        bottleneck: of the weakest block.
        optimum: what no placement of these servers can exceed.
        near_liars: of the weakest block that a liar holds; None if there is no liar.
        servers: that are there, serving or loading.
        visible: that are announced, those that vanished silently included.
        moves: made until now.
        gaps: blocks that nobody serves.
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
    """A route that a client planned from what was announced.

    Attributes:
        time: seconds.
        hops: of the route; 0 if some block was announced by nobody.
        seconds: a token was expected to take.
        lost: servers of the route that were gone or held other blocks.
    """

    time: float
    hops: int
    seconds: float
    lost: int


@dataclass(frozen=True)
class SimulationResult:
    """Everything that a simulation found."""

    scenario: Scenario
    seed: int
    joined: int
    left: int
    samples: tuple[SwarmSample, ...]
    routes: tuple[RouteSample, ...]
    moves: tuple[CompletedMove, ...]
    gaps: tuple[CoverageGap, ...]


def simulate(scenario: Scenario, seed: int | None = None) -> SimulationResult:
    """Run a scenario to its end. The same seed gives the same outcome; without one the scenario's own is taken."""
    seed = scenario.seed if seed is None else seed
    world = SimulatedSwarm(scenario, seed)
    samples: list[SwarmSample] = []
    routes: list[RouteSample] = []
    _repeat(world, scenario.sample_every, lambda: samples.append(_sample(world)))
    if scenario.route_every > 0:
        _repeat(world, scenario.route_every, lambda: routes.append(_route(world, scenario.blocks)))
    world.clock.run(scenario.duration)
    truth = world.truth
    return SimulationResult(
        scenario, seed, truth.joined, truth.left, tuple(samples), tuple(routes), tuple(truth.moves), truth.all_gaps()
    )


def _repeat(world: SimulatedSwarm, every: float, action: Callable[[], None]) -> None:
    def happen() -> None:
        action()
        world.clock.after(every, happen)

    world.clock.after(every, happen)


def _sample(world: SimulatedSwarm) -> SwarmSample:
    truth = world.truth
    world.directory.look(world.clock.now)
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


def _route(world: SimulatedSwarm, blocks: int) -> RouteSample:
    world.directory.look(world.clock.now)
    snapshot = SwarmSnapshot(world.directory.online())
    try:
        route = find_route(snapshot, Span(0, blocks))
    except MissingBlocks:
        return RouteSample(world.clock.now, 0, 0.0, 0)
    seconds = route_seconds(snapshot, route, RouteRequirements())
    return RouteSample(world.clock.now, len(route.hops), seconds, _lost(world, route))


def _lost(world: SimulatedSwarm, route: Route) -> int:
    """Servers of the route that do not serve the blocks that it wants of them."""
    serving = {machine.peer_id: machine.span for machine in world.alive.values() if machine.serves}
    spans = [(serving.get(hop.server.peer_id), hop.span) for hop in route.hops]
    return sum(span is None or wanted.start not in span or wanted.end - 1 not in span for span, wanted in spans)
