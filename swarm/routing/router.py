"""Plans a client's routes from the newest snapshot, the health of the peers, and the user's own choice of servers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from swarm.data_structures import Hop, Route, ServerInfo, Span
from swarm.errors import MissingBlocks
from swarm.routing.batch_split import BatchShare, split_batch
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import (
    CostModel,
    RouteRequirements,
    announced_seconds,
    is_nearer_over_client,
    route_seconds,
)
from swarm.routing.peer_health import LinkTrust, MeasuredOverruns, PeerHealth
from swarm.routing.round_trips import RoundTrips
from swarm.routing.suspicion import Suspicions
from swarm.routing.swarm_snapshot import SwarmSnapshot

PINGS_PER_ROUND = 32
"""Servers that a client pings at a time: enough to find near ones soon, few enough not to cause noticeable load."""

MAX_NAMED_SERVERS = 3
"""Number of servers, or of models, that an error message lists one by one."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A route without some servers, beside the one with them.

    Attributes:
        route: without them.
        seconds: that a step is expected to take there.
        current_seconds: that it is expected to take with them; 0 if they are not announced any more.
    """

    route: Route
    seconds: float
    current_seconds: float


class Router:
    """Plans routes for one client. All times are seconds of one clock, passed in by the caller.

    Args:
        allowed_servers: peer ids that may be used, looked at anew for each snapshot; None allows all.
        blocked_servers: peer ids that are never used.
        health: failures of the peers, which other components may record; a new, empty record by default.
    """

    def __init__(
        self,
        allowed_servers: AbstractSet[str] | None = None,
        blocked_servers: frozenset[str] = frozenset(),
        health: PeerHealth | None = None,
    ) -> None:
        self.allowed_servers = allowed_servers
        self.blocked_servers = blocked_servers
        self.health = health if health is not None else PeerHealth()
        self.links = LinkTrust()
        self.round_trips = RoundTrips()
        self.overruns = MeasuredOverruns()
        self.suspicions = Suspicions()
        self._announced: tuple[ServerInfo, ...] = ()
        self._excluded: Mapping[str, str] = {}
        self._other_models: tuple[str, ...] = ()
        self._snapshot = SwarmSnapshot(())
        self.unread = ""
        """Why the announcements could not be read lately, for error messages."""

    @property
    def snapshot(self) -> SwarmSnapshot:
        """The servers that this client may use, as of the last update, including banned ones."""
        return self._snapshot

    def usable(self, now: float) -> tuple[ServerInfo, ...]:
        """The servers of the snapshot that are neither banned nor quarantined."""
        avoid = self._avoided(now)
        return tuple(one for one in self._snapshot.servers if one.peer_id not in avoid)

    def offers(self, hop: Hop, now: float) -> bool:
        """Whether a usable server holds these blocks."""
        spans = [one.span for one in self.usable(now) if one.peer_id == hop.server.peer_id]
        return any(one.start <= hop.span.start and hop.span.end <= one.end for one in spans)

    def update(
        self,
        servers: Iterable[ServerInfo],
        excluded: Mapping[str, str] | None = None,
        other_models: Sequence[str] = (),
    ) -> None:
        """Replace the known servers.

        Args:
            servers: online and compatible servers, one for each peer id.
            excluded: peer id -> why the server cannot be used (see `swarm.routing.compatibility`), for error messages.
            other_models: names of the models that the swarm serves, if none serves this one; also for messages.
        """
        self._announced = tuple(servers)
        self._excluded = dict(excluded or {})
        self._other_models = tuple(other_models)
        self.unread = ""
        permitted = tuple(server for server in self._announced if self._is_permitted(server.peer_id))
        self._snapshot = SwarmSnapshot(permitted, self._snapshot.round_trips)

    def record_round_trips(self, round_trips: Mapping[str, float], now: float) -> None:
        """Record measured round trips: peer id -> seconds from this client to the server and back."""
        for peer_id, seconds in round_trips.items():
            self.round_trips.record(peer_id, seconds, now)
        self._snapshot = self._snapshot.with_round_trips(self.round_trips.recent(now))

    def route(
        self,
        span: Span,
        now: float,
        *,
        before: str | None = None,
        after: str | None = None,
        avoid: frozenset[str] = frozenset(),
        cache_tokens: int = 0,
        tokens: int = 1,
    ) -> Route:
        """Find the best route over `span`; see `RouteRequirements` for the arguments.

        Where there is none otherwise, servers at home that could not be reached a moment ago, or did not answer, are
        used all the same.

        Raises:
            MissingBlocks: no usable server holds some of the blocks. The error names them, and says why the servers
                that hold them cannot be used.
        """
        requirements = self._with_health(now, RouteRequirements(tokens, cache_tokens, before, after, avoid))
        try:
            try:
                return find_route(self._snapshot, span, requirements)
            except MissingBlocks:
                worth_a_try = self.health.worth_a_try(now) & self._relayed()
                if not worth_a_try:
                    raise
                return find_route(
                    self._snapshot, span, replace(requirements, avoid=requirements.avoid - worth_a_try | avoid)
                )
        except MissingBlocks as error:
            raise self._missing(error.blocks, now) from None

    def alternative(
        self, current: Route, now: float, before: str | None, after: str | None, cache_tokens: int
    ) -> Alternative | None:
        """The best route over the blocks of `current` without its servers, and what both take; None if there is none.

        Args:
            before, after, cache_tokens: see `RouteRequirements`.
        """
        peers = frozenset(hop.server.peer_id for hop in current.hops)
        requirements = self._with_health(now, RouteRequirements(1, cache_tokens, before, after))
        span = Span(current.hops[0].span.start, current.hops[-1].span.end)
        try:
            route = find_route(self._snapshot, span, replace(requirements, avoid=requirements.avoid | peers))
        except MissingBlocks:
            return None
        current_seconds = 0.0
        if peers <= self._snapshot.numbers.keys():  # the session has its room there already
            current_seconds = route_seconds(self._snapshot, current, replace(requirements, cache_tokens=0))
        return Alternative(route, route_seconds(self._snapshot, route, requirements), current_seconds)

    def may_push(self, before: str, after: str, now: float) -> bool:
        """Whether one server should push its outputs to another: neither has lied about the other, and the way over
        this client is not shorter."""
        return self.links.trusts(before, after, now) and not is_nearer_over_client(self._snapshot, before, after)

    def note_step(self, hop: Hop, seconds: float, tokens: int, now: float, overtaken: bool = False) -> None:
        """A server took `seconds` for a step, from this client and back, or from a server in the same place.

        Args:
            overtaken: it took at least that long, and another server was quicker. What it did before counts no more.
        """
        peer_id = hop.server.peer_id
        expected = announced_seconds(hop, tokens) + self._snapshot.round_trips.get(peer_id, 0.0)
        self.overruns.record(peer_id, (seconds - expected) / hop.span.length, now, overtaken)

    def split(
        self,
        span: Span,
        token_counts: Sequence[int],
        now: float,
        rng: random.Random,
        *,
        avoid: frozenset[str] = frozenset(),
    ) -> tuple[BatchShare, ...]:
        """Split a batch without a session among several routes; see `split_batch`. Raises `MissingBlocks`."""
        requirements = self._with_health(now, RouteRequirements(avoid=avoid))
        try:
            return split_batch(self._snapshot, span, token_counts, rng, requirements)
        except MissingBlocks as error:
            raise self._missing(error.blocks, now) from None

    def candidates_to_ping(self, span: Span, now: float, rng: random.Random, limit: int = PINGS_PER_ROUND) -> list[str]:
        """Ids of the peers to ping next, the most useful first.

        The client itself talks only to the first and the last server of a route. So three of four places alternate
        between holders of the first and of the last block; the rest go to all other servers, whose round trips tell
        roughly where they are. Servers that were measured recently come last. Faster servers are more likely to be
        used and tend to come sooner, but at random, so that every server is pinged eventually.
        """
        costs = CostModel(self._snapshot, self._with_health(now, RouteRequirements()))
        seconds = (costs.server_seconds / (self._snapshot.ends - self._snapshot.starts) + costs.block_seconds).tolist()
        order = {}
        for number in costs.usable.nonzero()[0].tolist():
            # Weighted sampling without replacement: exponential waiting times, shorter ones for faster servers.
            fresh = self.round_trips.is_fresh(self._snapshot.servers[number].peer_id, now)
            order[number] = (fresh, rng.expovariate(1.0) * seconds[number])
        ranked = sorted(order, key=order.__getitem__)
        spans = [self._snapshot.servers[number].span for number in ranked]
        first = [number for number, held in zip(ranked, spans, strict=True) if span.start in held]
        last = [number for number, held in zip(ranked, spans, strict=True) if span.end - 1 in held]
        ends = [number for pair in itertools.zip_longest(first, last) for number in pair if number is not None]
        # A server may be in several lists; its first position counts. A stable sort then puts recent ones last.
        candidates = dict.fromkeys([*ends[: limit - limit // 4], *ranked, *ends])
        chosen = sorted(candidates, key=lambda number: order[number][0])
        return [self._snapshot.servers[number].peer_id for number in chosen[:limit]]

    def _with_health(self, now: float, requirements: RouteRequirements) -> RouteRequirements:
        """The requirements plus the bans, penalties and measured overruns of the peers."""
        avoid = requirements.avoid | self._avoided(now)
        penalties = Counter(self.health.penalties(now))
        penalties.update(self.links.penalties(now))
        if len(self.suspicions):
            penalties.update(self.suspicions.penalties((one.peer_id for one in self._snapshot.servers), now))
        return replace(requirements, avoid=avoid, penalties=penalties, overruns=self.overruns.charges(now))

    def _avoided(self, now: float) -> frozenset[str]:
        return self.health.banned_peers(now) | self.suspicions.quarantined(now)

    def _relayed(self) -> frozenset[str]:
        """Ids of the servers that are reached through relays, which may be lost and replaced within seconds."""
        return frozenset(server.peer_id for server in self._snapshot.servers if server.relayed)

    def _is_permitted(self, peer_id: str) -> bool:
        allowed = self.allowed_servers is None or peer_id in self.allowed_servers
        return allowed and peer_id not in self.blocked_servers

    def _missing(self, blocks: Sequence[int], now: float) -> MissingBlocks:
        """The error where no server can be used for these blocks."""
        holders = [server for server in self._announced if any(block in server.span for block in blocks)]
        permitted = [server.peer_id for server in holders if self._is_permitted(server.peer_id)]
        all_wrong = bool(permitted) and all(self.health.gave_wrong_answer(peer_id, now) for peer_id in permitted)
        return MissingBlocks(blocks, self._explain_missing_blocks(holders, now), all_wrong)

    def _explain_missing_blocks(self, holders: Sequence[ServerInfo], now: float) -> str:
        """Why none of the servers that hold some blocks can be used, for an error message."""
        if holders:
            first = holders[:MAX_NAMED_SERVERS]
            reasons = [f"{server.short_id} {self._explain_exclusion(server.peer_id, now)}" for server in first]
            if len(holders) > MAX_NAMED_SERVERS:
                reasons.append(f"{len(holders) - MAX_NAMED_SERVERS} more servers cannot be used either")
            return "; ".join(reasons)
        if self._excluded:
            peer_id, reason = next(iter(self._excluded.items()))
            return f"{len(self._excluded)} server(s) cannot be used, such as …{peer_id[-6:]}: {reason}"
        if self._other_models:
            named = ", ".join(self._other_models[:MAX_NAMED_SERVERS])
            more = len(self._other_models) - MAX_NAMED_SERVERS
            return (
                f"this swarm does not serve that model; it serves {named}{f' and {more} more' if more > 0 else ''}. "
                "A model in a local folder goes by the folder's name"
            )
        return self.unread or "no online server announces them"

    def _explain_exclusion(self, peer_id: str, now: float) -> str:
        """Why the server cannot be used now, as the end of a sentence."""
        if peer_id in self.blocked_servers:
            return "is in blocked_servers"
        if not self._is_permitted(peer_id):
            return "is not in allowed_servers"
        if peer_id in self.suspicions.quarantined(now):
            return "has computed something else than other servers, as audits have shown"
        until = self.health.banned_until(peer_id, now)
        if until is not None:
            return f"{self.health.reasons(peer_id)[-1].value} and is avoided for {until - now:.0f} s more"
        return "has just failed"
