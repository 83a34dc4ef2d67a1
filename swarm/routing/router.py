"""A client's router: the newest snapshot, the health of the peers, and the person's own choice of servers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from swarm.data_structures import Route, ServerInfo, Span
from swarm.errors import MissingBlocks
from swarm.routing.batch_split import BatchShare, split_batch
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import CostModel, RouteRequirements
from swarm.routing.peer_health import PeerHealth
from swarm.routing.round_trips import RoundTrips
from swarm.routing.swarm_snapshot import SwarmSnapshot

PINGS = 32
"""Servers that a client pings at a time: enough to find near ones soon, few enough to disturb nobody."""

MAX_NAMED = 3
"""Servers that an error names one by one."""


class Router:
    """Plans routes for one client. All times are seconds of one clock that the caller reads.

    Args:
        allowed_servers: peer ids that may be used; None allows all.
        blocked_servers: peer ids that are never used.
        health: shared with whoever notes failures; an own one by default.
    """

    def __init__(
        self,
        allowed_servers: frozenset[str] | None = None,
        blocked_servers: frozenset[str] = frozenset(),
        health: PeerHealth | None = None,
    ) -> None:
        self.allowed_servers = allowed_servers
        self.blocked_servers = blocked_servers
        self.health = health if health is not None else PeerHealth()
        self.round_trips = RoundTrips()
        self._announced: tuple[ServerInfo, ...] = ()
        self._excluded: Mapping[str, str] = {}
        self._snapshot = SwarmSnapshot(())

    @property
    def snapshot(self) -> SwarmSnapshot:
        """The servers that this client may use, as last updated; banned ones included."""
        return self._snapshot

    def update(self, servers: Iterable[ServerInfo], excluded: Mapping[str, str] | None = None) -> None:
        """Take a new view of the swarm, and the round trips measured until now, into use.

        Args:
            servers: online and compatible, one for each peer id.
            excluded: peer id -> why the server cannot be used (see `swarm.routing.compatibility`); for errors only.
        """
        self._announced = tuple(servers)
        self._excluded = dict(excluded or {})
        permitted = tuple(server for server in self._announced if self._is_permitted(server.peer_id))
        self._snapshot = SwarmSnapshot(permitted, self._snapshot.round_trips)

    def measured(self, round_trips: Mapping[str, float], now: float) -> None:
        """Note measured round trips: peer id -> seconds from this client to the server and back."""
        for peer_id, seconds in round_trips.items():
            self.round_trips.add(peer_id, seconds, now)
        self._snapshot = self._snapshot.with_round_trips(self.round_trips.all(now))

    def route(
        self,
        wanted: Span,
        now: float,
        *,
        before: str | None = None,
        after: str | None = None,
        avoid: frozenset[str] = frozenset(),
        cache_tokens: int = 0,
        tokens: int = 1,
    ) -> Route:
        """The best route over `wanted` that this client knows; see `RouteRequirements` for the arguments.

        Raises:
            MissingBlocks: names the blocks that no server can be used for, and why those who hold them cannot.
        """
        demand = self._demand(now, RouteRequirements(tokens, cache_tokens, before, after, avoid))
        try:
            return find_route(self._snapshot, wanted, demand)
        except MissingBlocks as error:
            raise MissingBlocks(error.blocks, self._why(error.blocks, now)) from None

    def split(
        self,
        wanted: Span,
        token_counts: Sequence[int],
        now: float,
        rng: random.Random,
        *,
        avoid: frozenset[str] = frozenset(),
    ) -> tuple[BatchShare, ...]:
        """Split a batch without a session among several routes; see `split_batch`. Raises `MissingBlocks`."""
        demand = self._demand(now, RouteRequirements(avoid=avoid))
        try:
            return split_batch(self._snapshot, wanted, token_counts, rng, demand)
        except MissingBlocks as error:
            raise MissingBlocks(error.blocks, self._why(error.blocks, now)) from None

    def candidates_to_ping(self, wanted: Span, now: float, rng: random.Random, limit: int = PINGS) -> list[str]:
        """Peer ids to ping next, most useful first.

        The client itself talks to the first and to the last server of a route only, so those who hold the first or the
        last block come first, in turn, in three of four places; then all others, whose round trips tell roughly where
        they are. Those measured lately come last. Faster servers, likelier to be used, tend to come sooner; by
        chance, so that each is reached some time.
        """
        costs = CostModel(self._snapshot, self._demand(now, RouteRequirements()))
        pace = (costs.enter / (self._snapshot.ends - self._snapshot.starts) + costs.block).tolist()
        order = {}
        for number in costs.usable.nonzero()[0].tolist():
            # Weighted sampling without replacement: exponential times, those of the faster servers shorter.
            fresh = self.round_trips.is_fresh(self._snapshot.servers[number].peer_id, now)
            order[number] = (fresh, rng.expovariate(1.0) * pace[number])
        ranked = sorted(order, key=order.__getitem__)
        spans = [self._snapshot.servers[number].span for number in ranked]
        first = [number for number, span in zip(ranked, spans, strict=True) if wanted.start in span]
        last = [number for number, span in zip(ranked, spans, strict=True) if wanted.end - 1 in span]
        ends = [number for pair in itertools.zip_longest(first, last) for number in pair if number is not None]
        # A server may stand in several lists; its first place counts. Then, stable, those measured lately go last.
        due = dict.fromkeys([*ends[: limit - limit // 4], *ranked, *ends])
        chosen = sorted(due, key=lambda number: order[number][0])
        return [self._snapshot.servers[number].peer_id for number in chosen[:limit]]

    def _demand(self, now: float, demand: RouteRequirements) -> RouteRequirements:
        """The demand, with what is known of the peers' health."""
        return replace(demand, avoid=demand.avoid | self.health.all_banned(now), penalties=self.health.penalties(now))

    def _is_permitted(self, peer_id: str) -> bool:
        allowed = self.allowed_servers is None or peer_id in self.allowed_servers
        return allowed and peer_id not in self.blocked_servers

    def _why(self, blocks: Sequence[int], now: float) -> str:
        """Why nobody can be used for the blocks, for people."""
        holders = [server for server in self._announced if any(block in server.span for block in blocks)]
        if holders:
            reasons = [f"{one.short_id} {self._why_not(one.peer_id, now)}" for one in holders[:MAX_NAMED]]
            if len(holders) > MAX_NAMED:
                reasons.append(f"{len(holders) - MAX_NAMED} more servers cannot be used either")
            return "; ".join(reasons)
        if self._excluded:
            peer_id, reason = next(iter(self._excluded.items()))
            return f"{len(self._excluded)} server(s) cannot be used, such as …{peer_id[-6:]}: {reason}"
        return "no online server announces them"

    def _why_not(self, peer_id: str, now: float) -> str:
        if peer_id in self.blocked_servers:
            return "is in blocked_servers"
        if not self._is_permitted(peer_id):
            return "is not in allowed_servers"
        until = self.health.banned_until(peer_id, now)
        if until is not None:
            return f"{self.health.reasons(peer_id)[-1].value} and is avoided for {until - now:.0f} s more"
        return "has just failed"
