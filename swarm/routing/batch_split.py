"""Splitting a batch without a session among several routes, in proportion to what they compute (SWARM parallelism,
Ryabinin et al. 2023, section 3.2; Petals, section 3.2).

The portions are sized so that all end at about the same time. Each more route costs the same travel again for ever
fewer rows, so routes are added only while the batch ends clearly sooner.
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

MAX_PORTIONS = 8
"""Routes that a batch is split among at most: planning each takes a search of its own."""

WORTHWHILE = 0.95
"""Share of the time without it that a batch may take at most with one more route."""

SPREAD = 0.1
"""Share of a hop's time by which chance may favour a server, so that clients do not all choose the same ones."""


FASTEST = 1e-12
"""Seconds a token below which no route is taken to be."""


@dataclass(frozen=True)
class BatchShare:
    """Some rows of a batch and where they go.

    Attributes:
        rows: their indices in the batch, ascending.
        route: over all wanted blocks.
    """

    rows: tuple[int, ...]
    route: Route


@dataclass(frozen=True)
class _TimedRoute:
    """A route, and its expected seconds for n tokens: `fixed + n * each`."""

    route: Route
    fixed: float
    each: float


def split_batch(
    snapshot: SwarmSnapshot,
    wanted: Span,
    token_counts: Sequence[int],
    rng: random.Random,
    demand: RouteRequirements | None = None,
    max_portions: int = MAX_PORTIONS,
) -> tuple[BatchShare, ...]:
    """Decide which rows of a batch take which route.

    Args:
        snapshot: the swarm.
        wanted: blocks to compute.
        token_counts: tokens of each row, >= 1.
        rng: decides between servers that are about equally good.
        demand: whom to avoid and penalties; its `tokens` are not read.
        max_portions: routes used at most.

    Returns:
        Portions that hold every row exactly once; one portion if more would not be worthwhile; none without rows.

    Raises:
        MissingBlocks: no usable server holds some of the blocks.
    """
    if not token_counts:
        return ()
    most = min(max_portions, len(token_counts))
    lanes = _choose_lanes(snapshot, wanted, token_counts, rng, demand or RouteRequirements(), most)
    rows: list[list[int]] = [[] for _ in lanes]
    ends = [lane.fixed for lane in lanes]
    # Longest rows first, each where it ends soonest: the classic rule for machines of different speed.
    for row in sorted(range(len(token_counts)), key=lambda row: (-token_counts[row], row)):
        finish, best = min((ends[k] + token_counts[row] * lane.each, k) for k, lane in enumerate(lanes))
        rows[best].append(row)
        ends[best] = finish
    return tuple(BatchShare(tuple(sorted(mine)), lane.route) for mine, lane in zip(rows, lanes, strict=True) if mine)


def _choose_lanes(
    snapshot: SwarmSnapshot,
    wanted: Span,
    token_counts: Sequence[int],
    rng: random.Random,
    demand: RouteRequirements,
    most: int,
) -> list[_TimedRoute]:
    """Routes to split the batch among: one more as long as that is worthwhile."""
    total = sum(token_counts)
    lone = find_route(snapshot, wanted, replace(demand, tokens=total))
    spread = SPREAD * route_seconds(snapshot, lone, replace(demand, tokens=total)) / len(lone.hops)
    taste = {server.peer_id: rng.uniform(0, spread) for server in snapshot.servers}

    def best_lane(tokens: float, waits: Mapping[str, float]) -> _TimedRoute:
        wish = replace(demand, tokens=math.ceil(tokens), penalties=_add(taste, waits))
        return _lane(snapshot, find_route(snapshot, wanted, wish), total, replace(demand, penalties=waits))

    lanes = [best_lane(total, demand.penalties)]
    finish = _finish(lanes, total)
    tokens = total / 2
    while len(lanes) < most and tokens >= min(token_counts):
        # What a server already computes for this batch, another portion would have to wait for.
        lane = best_lane(tokens, _add(demand.penalties, _busy(snapshot, lanes, total)))
        if lane.fixed + tokens * lane.each > finish:
            tokens /= 2  # more than it could do in time; another route may be better for less
            continue
        sooner = _finish([*lanes, lane], total)
        if sooner > WORTHWHILE * finish:
            break
        lanes.append(lane)
        finish = sooner
    return lanes


def _lane(snapshot: SwarmSnapshot, route: Route, total: int, demand: RouteRequirements) -> _TimedRoute:
    one = route_seconds(snapshot, route, replace(demand, tokens=1))
    every = route_seconds(snapshot, route, replace(demand, tokens=total))
    each = max(every - one, 0.0) / max(total - 1, 1)
    return _TimedRoute(route, max(one - each, 0.0), each)


def _busy(snapshot: SwarmSnapshot, lanes: Sequence[_TimedRoute], total: int) -> dict[str, float]:
    """Peer id -> seconds that it computes if `total` tokens are split among the lanes so that all end together."""
    finish = _finish(lanes, total)
    per_token = CostModel(snapshot, RouteRequirements(tokens=total)).block / total
    busy: dict[str, float] = defaultdict(float)
    for lane in lanes:
        tokens = min(total, max(finish - lane.fixed, 0.0) / max(lane.each, FASTEST))
        for hop in lane.route.hops:
            peer_id = hop.server.peer_id
            busy[peer_id] += tokens * hop.span.length * float(per_token[snapshot.numbers[peer_id]])
    return busy


def _add(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {**one, **{peer_id: one.get(peer_id, 0.0) + seconds for peer_id, seconds in other.items()}}


def _finish(lanes: Sequence[_TimedRoute], total: int) -> float:
    """When `total` tokens are done, if they are split so that all lanes that are used end together."""
    finish = float("inf")
    rate = weighted = 0.0
    for lane in sorted(lanes, key=lambda lane: lane.fixed):
        if lane.fixed >= finish:
            break  # the others are done before this one would begin
        rate += 1 / max(lane.each, FASTEST)
        weighted += lane.fixed / max(lane.each, FASTEST)
        finish = (total + weighted) / rate
    return finish
