"""A server of a simulation: its properties, and what it has announced and decided so far."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from swarm.data_structures import Mobility, ServerInfo, ServerState, Span
from swarm.planning.simulation.scenario import LieEvent, Scenario
from swarm.server.placement.move_decision import MoveHistory


@dataclass
class SimulatedServer:
    """One server of the simulated swarm.

    Attributes:
        row: its number; servers are numbered in the order in which they join.
        length: number of blocks that it holds.
        throughput: blocks/s that it really computes.
        announced: blocks/s that it announces.
        load_seconds: how long it takes to load its blocks.
        pinned: whether it never moves.
        state, span, mobility: what it announced last.
        changed: when it announced that.
        history: what it remembers between two checks for moves.
    """

    row: int
    length: int
    throughput: float
    announced: float
    load_seconds: float
    pinned: bool
    state: ServerState = ServerState.OFFLINE
    span: Span | None = None
    mobility: Mobility = Mobility.FREE
    changed: float = 0.0
    history: MoveHistory = field(default_factory=MoveHistory)

    @property
    def peer_id(self) -> str:
        return f"server{self.row:06d}"

    @property
    def lies(self) -> bool:
        return self.announced != self.throughput

    @property
    def serves(self) -> bool:
        return self.state is ServerState.ONLINE

    @property
    def rate(self) -> float:
        """Tokens/s that it really adds to each of its blocks while it serves."""
        return self.throughput / self.length

    def announcement(self) -> ServerInfo:
        """What it announces now."""
        assert self.span is not None
        return ServerInfo(
            peer_id=self.peer_id,
            span=self.span,
            state=self.state,
            throughput=self.announced,
            cache_tokens_free=1 << 20,
            revision="main",
            digests=(),
            compute_dtype="bfloat16",
            quantization="none",
            version="simulated",
            mobility=self.mobility,
        )


def draw_server(
    scenario: Scenario, row: int, randomness: random.Random, lie: LieEvent | None = None
) -> SimulatedServer:
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
