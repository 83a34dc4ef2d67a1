"""Splits a batch without a session among several routes, in proportion to their speed.

See SWARM parallelism (Ryabinin et al. 2023, section 3.2) and Petals (section 3.2). The shares are sized so that all
of them end at about the same time. Every additional route costs the same travel time for fewer and fewer sequences,
so a route is added only while the batch ends noticeably sooner.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.data_structures import Route, Span
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import CostModel, RouteRequirements, route_seconds
from swarm.routing.swarm_snapshot import SwarmSnapshot

MAX_ROUTES_PER_BATCH = 8
"""Maximum number of routes for one batch: each of them takes a route search of its own."""

MAX_TIME_RATIO = 0.95
"""A route is added only if the batch then takes at most this fraction of the time it takes without that route."""

RANDOM_PREFERENCE = 0.1
"""A server is penalised at random by up to this fraction of a hop's time, so that clients choose different servers."""

MIN_SECONDS_PER_TOKEN = 1e-12
"""Lower bound on the assumed time per token, to avoid a division by zero."""


@dataclass(frozen=True)
class BatchShare:
    """Some sequences of a batch and the route they take.

    Attributes:
        sequences: their indices in the batch, ascending.
        route: a route over all requested blocks.
    """

    sequences: tuple[int, ...]
    route: Route


@dataclass(frozen=True)
class _TimedRoute:
    """A route and its expected time for n tokens: `fixed_seconds + n * token_seconds`."""

    route: Route
    fixed_seconds: float
    token_seconds: float


def split_batch(
    snapshot: SwarmSnapshot,
    span: Span,
    token_counts: Sequence[int],
    rng: random.Random,
    requirements: RouteRequirements | None = None,
    max_routes: int = MAX_ROUTES_PER_BATCH,
) -> tuple[BatchShare, ...]:
    """Decide which sequences of a batch take which route.

    Args:
        snapshot: the swarm.
        span: the blocks to compute.
        token_counts: number of tokens of each sequence, >= 1.
        rng: decides between servers that are about equally good.
        requirements: servers to avoid and penalties; its `tokens` are ignored.
        max_routes: maximum number of routes.

    Returns:
        Shares that together hold every sequence exactly once. A single share if splitting would not pay off, none if
        there are no sequences.

    Raises:
        MissingBlocks: no usable server holds some of the blocks.
    """
    if not token_counts:
        return ()
    limit = min(max_routes, len(token_counts))
    routes = _choose_routes(snapshot, span, token_counts, rng, requirements or RouteRequirements(), limit)
    shares: list[list[int]] = [[] for _ in routes]
    ends = [route.fixed_seconds for route in routes]
    # Longest sequences first, each where it ends soonest: the classic rule for machines of different speed.
    for sequence in sorted(range(len(token_counts)), key=lambda sequence: (-token_counts[sequence], sequence)):
        tokens = token_counts[sequence]
        finish, best = min((ends[k] + tokens * route.token_seconds, k) for k, route in enumerate(routes))
        shares[best].append(sequence)
        ends[best] = finish
    pairs = zip(shares, routes, strict=True)
    return tuple(BatchShare(tuple(sorted(share)), timed.route) for share, timed in pairs if share)


def _choose_routes(
    snapshot: SwarmSnapshot,
    span: Span,
    token_counts: Sequence[int],
    rng: random.Random,
    requirements: RouteRequirements,
    limit: int,
) -> list[_TimedRoute]:
    """Choose the routes to split the batch among, adding routes while that pays off."""
    total = sum(token_counts)
    single = find_route(snapshot, span, replace(requirements, tokens=total))
    single_seconds = route_seconds(snapshot, single, replace(requirements, tokens=total))
    max_penalty = RANDOM_PREFERENCE * single_seconds / len(single.hops)
    random_penalties = {server.peer_id: rng.uniform(0, max_penalty) for server in snapshot.servers}

    def best_route(tokens: float, penalties: Mapping[str, float]) -> _TimedRoute:
        all_penalties = _sum_by_peer(random_penalties, penalties)
        route = find_route(snapshot, span, replace(requirements, tokens=math.ceil(tokens), penalties=all_penalties))
        return _timed_route(snapshot, route, total, replace(requirements, penalties=penalties))

    routes = [best_route(total, requirements.penalties)]
    finish = _finish_time(routes, total)
    tokens = total / 2
    while len(routes) < limit and tokens >= min(token_counts):
        # Another share would have to wait for what a server already computes for this batch.
        route = best_route(tokens, _sum_by_peer(requirements.penalties, _busy_seconds(snapshot, routes, total)))
        if route.fixed_seconds + tokens * route.token_seconds > finish:
            tokens /= 2  # too many tokens to finish in time; for fewer tokens another route may be better
            continue
        sooner = _finish_time([*routes, route], total)
        if sooner > MAX_TIME_RATIO * finish:
            break
        routes.append(route)
        finish = sooner
    return routes


def _timed_route(snapshot: SwarmSnapshot, route: Route, total: int, requirements: RouteRequirements) -> _TimedRoute:
    first = route_seconds(snapshot, route, replace(requirements, tokens=1))
    all_tokens = route_seconds(snapshot, route, replace(requirements, tokens=total))
    token_seconds = max(all_tokens - first, 0.0) / max(total - 1, 1)
    return _TimedRoute(route, max(first - token_seconds, 0.0), token_seconds)


def _busy_seconds(snapshot: SwarmSnapshot, routes: Sequence[_TimedRoute], total: int) -> dict[str, float]:
    """Peer id -> seconds of computing if `total` tokens are split among the routes so that all end together."""
    finish = _finish_time(routes, total)
    per_token = CostModel(snapshot, RouteRequirements(tokens=total)).block_seconds / total
    busy: dict[str, float] = defaultdict(float)
    for timed in routes:
        tokens = min(total, max(finish - timed.fixed_seconds, 0.0) / max(timed.token_seconds, MIN_SECONDS_PER_TOKEN))
        for hop in timed.route.hops:
            peer_id = hop.server.peer_id
            busy[peer_id] += tokens * hop.span.length * float(per_token[snapshot.numbers[peer_id]])
    return busy


def _sum_by_peer(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {**one, **{peer_id: one.get(peer_id, 0.0) + seconds for peer_id, seconds in other.items()}}


def _finish_time(routes: Sequence[_TimedRoute], total: int) -> float:
    """Seconds until `total` tokens are done if they are split so that all routes in use end together."""
    finish = float("inf")
    rate = weighted = 0.0
    for timed in sorted(routes, key=lambda timed: timed.fixed_seconds):
        if timed.fixed_seconds >= finish:
            break  # the other routes are done before this one would begin
        rate += 1 / max(timed.token_seconds, MIN_SECONDS_PER_TOKEN)
        weighted += timed.fixed_seconds / max(timed.token_seconds, MIN_SECONDS_PER_TOKEN)
        finish = (total + weighted) / rate
    return finish
