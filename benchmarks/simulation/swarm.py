"""The life of the servers of a simulated swarm: they join, load, announce, check for moves, and leave.

They decide with `initial_blocks` and `move_decision`, from what the directory shows at that moment. Servers that see
the same announcements compute the same plan, so it is computed only once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable

from benchmarks.simulation.scenario import Churn, Event, Join, Leave, Lie, Scenario
from benchmarks.simulation.state import CompletedMove, GroundTruth, SimulatedDirectory, SimulatedServer
from swarm.data_structures import Mobility, ServerState, Span
from swarm.server.placement.initial_blocks import weakest_window
from swarm.server.placement.move_decision import MoveHistory, MovePlan, decide_from_plan, plan_moves


class VirtualClock:
    """A clock that jumps from one scheduled action to the next.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule `action` at `time`, or now if that has passed."""
        heapq.heappush(self._due, (max(time, self.now), next(self._count), action))

    def call_after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule `action` `seconds` from now."""
        self.call_at(self.now + seconds, action)

    def run_until(self, until: float) -> None:
        """Call all actions that are due up to and including `until`, then stop there."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until


class SimulatedSwarm:
    """One simulated swarm. All randomness comes from the seed.

    Attributes:
        clock: the virtual clock.
        directory: what the servers see.
        truth: the true state of the swarm.
        alive: the servers that have not left, by number.
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
            self.clock.call_at(event.at, functools.partial(self._handle_event, event))

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Join):
            for _ in range(event.servers):
                self.clock.call_after(self._random.uniform(0, event.over), self._join)
        elif isinstance(event, Lie):
            self._join(event)
        elif isinstance(event, Leave):
            for server in list(self.alive.values()):
                if (
                    server.span is not None
                    and server.span.start < event.blocks[1]
                    and event.blocks[0] < server.span.end
                ):
                    self._leave(server, event.silently)
        else:
            self._churn(event)

    def _churn(self, event: Churn) -> None:
        """Replace a random server by a new one and schedule the next replacement: a Poisson process."""
        if self.clock.now > event.at and self.alive:
            self._leave(self._random.choice(list(self.alive.values())), self._random.random() < event.silently)
            self._join()
        hourly = event.hourly * max(1, len(self.alive))
        if hourly > 0:
            pause = self._random.expovariate(hourly / 3600)
            if self.clock.now + pause < event.until:
                self.clock.call_after(max(pause, 1e-6), functools.partial(self._churn, event))

    def _join(self, lie: Lie | None = None) -> None:
        server = draw_server(self._scenario, self._joined, self._random, lie)
        self._joined += 1
        self.alive[server.row] = server
        self.truth.server_joined(server.row, server.throughput)
        self.directory.advance(self.clock.now)
        self._start_loading(server, weakest_window(self.directory.throughputs().tolist(), server.length))
        if not server.pinned:
            self.clock.call_after(
                server.load_seconds + self._random.uniform(0, self._scenario.update_period),
                functools.partial(self._check_for_move, server),
            )

    def _start_loading(self, server: SimulatedServer, span: Span) -> None:
        server.span = span
        server.history = MoveHistory(self.clock.now, server.history.expected)
        server.mobility = Mobility.PINNED if server.pinned else Mobility.COOLING
        self._announce(server, ServerState.JOINING)
        self.clock.call_after(server.load_seconds, functools.partial(self._finish_loading, server))

    def _finish_loading(self, server: SimulatedServer) -> None:
        if server.row in self.alive and server.span is not None:
            self._announce(server, ServerState.ONLINE)
            self.truth.start_serving(server.row, server.span, server.rate, server.lies, self.clock.now)

    def _announce(self, server: SimulatedServer, state: ServerState) -> None:
        server.state, server.changed = state, self.clock.now
        self.directory.announce(server.row, server.announcement(), self.clock.now)

    def _leave(self, server: SimulatedServer, silently: bool) -> None:
        del self.alive[server.row]
        self._stop_serving(server)
        self.truth.server_left(server.row)
        if silently:
            self.directory.vanish(server.row, server.changed, self.clock.now)
        else:
            self._announce(server, ServerState.OFFLINE)

    def _stop_serving(self, server: SimulatedServer) -> None:
        if server.state is ServerState.ONLINE and server.span is not None:
            self.truth.stop_serving(server.row, server.span, self.clock.now)

    def _check_for_move(self, server: SimulatedServer) -> None:
        """Do what a real server does every update period."""
        if server.row not in self.alive:
            return
        self.clock.call_after(self._scenario.update_period, functools.partial(self._check_for_move, server))
        if not server.serves:
            return
        now, old = self.clock.now, server.span
        if server.mobility is Mobility.COOLING and not server.history.is_cooling_down(now, self._policy):
            server.mobility = Mobility.FREE
            self._announce(server, server.state)
        self.directory.advance(now)
        plan = self._plan_moves(server.history.overdue_servers(now, self._policy) - {server.peer_id})
        decision = decide_from_plan(plan, server.peer_id, now, server.history, self._policy)
        server.history = decision.history
        if decision.span is not None and old is not None:
            self.truth.moves.append(CompletedMove(now, server.peer_id, old, decision.span, decision.closes_gap))
            self._stop_serving(server)
            self._start_loading(server, decision.span)

    def _plan_moves(self, without: frozenset[str]) -> MovePlan:
        if self._plans_version != self.directory.version:
            self._plans, self._plans_version = {}, self.directory.version
        if without not in self._plans:
            self._plans[without] = plan_moves(self.directory.snapshot(), self._policy, without)
        return self._plans[without]


def draw_server(scenario: Scenario, row: int, randomness: random.Random, lie: Lie | None = None) -> SimulatedServer:
    """Draw the properties of the next server to join, which makes the false announcement `lie` if there is one."""
    kind = scenario.machines
    length = randomness.randint(*kind.blocks)
    throughput = kind.throughput * math.exp(randomness.gauss(0.0, kind.spread))
    disk = kind.disk * math.exp(randomness.gauss(0.0, kind.spread / 2))
    return SimulatedServer(
        row=row,
        length=length,
        throughput=throughput,
        announced=lie.announced if lie else throughput,
        load_seconds=length * scenario.block_bytes / disk,
        pinned=lie is not None or randomness.random() < kind.pinned,
    )
