"""The life of the simulated servers: they join, load, announce, check for moves, and leave.

What they decide is decided by `initial_blocks` and `move_policy`, from what the
directory shows them at that moment. Servers that see the
same make the same plan, so it is made once for all.
"""

from __future__ import annotations

import functools
import random

from swarm.data_structures import Mobility, ServerState, Span
from swarm.planning.simulation.ground_truth import CompletedMove, GroundTruth
from swarm.planning.simulation.scenario import ChurnEvent, JoinEvent, LeaveEvent, LieEvent, Scenario, ScenarioEvent
from swarm.planning.simulation.simulated_directory import SimulatedDirectory
from swarm.planning.simulation.simulated_server import SimulatedServer, draw
from swarm.planning.simulation.virtual_clock import VirtualClock
from swarm.server.placement.initial_blocks import weakest_window
from swarm.server.placement.move_policy import MoveHistory, MovePlan, decide_from_plan, plan_moves


class SimulatedSwarm:
    """One simulated swarm. Everything that is random comes from the seed.

    Attributes:
        clock: the virtual clock.
        directory: what the servers see.
        truth: what is.
        alive: the servers that are there, by number.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.clock = VirtualClock()
        self.directory = SimulatedDirectory(
            scenario.blocks,
            scenario.visible_every,
            scenario.update_period,
            scenario.record_periods * scenario.update_period,
        )
        self.truth = GroundTruth(scenario.blocks)
        self.alive: dict[int, SimulatedServer] = {}
        self._scenario = scenario
        self._policy = scenario.policy
        self._random = random.Random(seed)
        self._joined = 0
        self._plans: dict[frozenset[str], MovePlan] = {}
        self._plans_version = -1
        for event in scenario.events:
            self.clock.at(event.at, functools.partial(self._happen, event))

    def _happen(self, event: ScenarioEvent) -> None:
        if isinstance(event, JoinEvent):
            for _ in range(event.servers):
                self.clock.after(self._random.uniform(0, event.over), self._join)
        elif isinstance(event, LieEvent):
            for _ in range(event.servers):
                self._join(event)
        elif isinstance(event, LeaveEvent):
            for machine in list(self.alive.values()):
                if (
                    machine.span is not None
                    and machine.span.start < event.blocks[1]
                    and event.blocks[0] < machine.span.end
                ):
                    self._leave(machine, event.silently)
        else:
            self._churn(event)

    def _churn(self, event: ChurnEvent) -> None:
        """One server leaves, another one joins, and so on: a Poisson process."""
        if self.clock.now > event.at and self.alive:
            self._leave(self._random.choice(list(self.alive.values())), self._random.random() < event.silently)
            self._join()
        hourly = event.hourly * max(1, len(self.alive))
        if hourly > 0:
            pause = self._random.expovariate(hourly / 3600)
            if self.clock.now + pause < event.until:
                self.clock.after(max(pause, 1e-6), functools.partial(self._churn, event))

    def _join(self, lie: LieEvent | None = None) -> None:
        machine = draw(self._scenario, self._joined, self._random, lie)
        self._joined += 1
        self.alive[machine.row] = machine
        self.truth.present(machine.row, machine.throughput)
        self.directory.look(self.clock.now)
        self._load(machine, weakest_window(self.directory.throughputs().tolist(), machine.length))
        if not machine.pinned:
            self.clock.after(
                machine.load_seconds + self._random.uniform(0, self._scenario.update_period),
                functools.partial(self._check, machine),
            )

    def _load(self, machine: SimulatedServer, span: Span) -> None:
        machine.span = span
        machine.history = MoveHistory(self.clock.now, machine.history.expected)
        machine.mobility = Mobility.PINNED if machine.pinned else Mobility.COOLING
        self._announce(machine, ServerState.JOINING)
        self.clock.after(machine.load_seconds, functools.partial(self._loaded, machine))

    def _loaded(self, machine: SimulatedServer) -> None:
        if machine.row in self.alive and machine.span is not None:
            self._announce(machine, ServerState.ONLINE)
            self.truth.serves(machine.row, machine.span, machine.rate, machine.lies, self.clock.now)

    def _announce(self, machine: SimulatedServer, state: ServerState) -> None:
        machine.state, machine.changed = state, self.clock.now
        self.directory.announce(machine.row, machine.announcement(), self.clock.now)

    def _leave(self, machine: SimulatedServer, silently: bool) -> None:
        del self.alive[machine.row]
        self._serve_no_more(machine)
        self.truth.gone(machine.row)
        if silently:
            self.directory.vanish(machine.row, machine.changed, self.clock.now)
        else:
            self._announce(machine, ServerState.OFFLINE)

    def _serve_no_more(self, machine: SimulatedServer) -> None:
        if machine.state is ServerState.ONLINE and machine.span is not None:
            self.truth.serves_no_more(machine.row, machine.span, self.clock.now)

    def _check(self, machine: SimulatedServer) -> None:
        """What the loop of a real server does every update period."""
        if machine.row not in self.alive:
            return
        self.clock.after(self._scenario.update_period, functools.partial(self._check, machine))
        if not machine.serves:
            return
        now, old = self.clock.now, machine.span
        if machine.mobility is Mobility.COOLING and not machine.history.cools(now, self._policy):
            machine.mobility = Mobility.FREE
            self._announce(machine, machine.state)
        self.directory.look(now)
        plan = self._plan(machine.history.overdue(now, self._policy) - {machine.peer_id})
        decision = decide_from_plan(plan, machine.peer_id, now, machine.history, self._policy)
        machine.history = decision.history
        if decision.span is not None and old is not None:
            self.truth.moves.append(CompletedMove(now, machine.peer_id, old, decision.span, decision.closes_gap))
            self._serve_no_more(machine)
            self._load(machine, decision.span)

    def _plan(self, without: frozenset[str]) -> MovePlan:
        if self._plans_version != self.directory.version:
            self._plans, self._plans_version = {}, self.directory.version
        if without not in self._plans:
            self._plans[without] = plan_moves(self.directory.snapshot(), self._policy, without)
        return self._plans[without]
