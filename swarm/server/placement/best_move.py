"""Where the servers of a swarm are, and which move would help most. Pure; `move_decision` makes plans of such moves.

All arrays have one entry for each server or for each block. A *candidate* is a server and a window of blocks that it
could move to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.data_structures import Mobility, ServerInfo, ServerState, Span
from swarm.server.placement.initial_blocks import plausible_rate, sum_by_block

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


MAX_CANDIDATES = 128
"""Servers that are examined closely for one move, if there are more."""


@dataclass(frozen=True, eq=False)
class PlacementSnapshot:
    """What the swarm announces, in an order that is the same for every server.

    Attributes:
        peers: the peer ids.
        starts, ends: the blocks that they hold.
        rates: tokens/s that they add to each of their blocks, as announced.
        serving: False while a server is still loading.
        mobility: `Mobility` of each.
        blocks: how many the model has.
    """

    peers: tuple[str, ...]
    starts: Ints
    ends: Ints
    rates: Floats
    serving: Flags
    mobility: Ints
    blocks: int


def take_snapshot(servers: Iterable[ServerInfo], blocks: int) -> PlacementSnapshot:
    """The servers that count: loading or online, and inside the model of so many blocks."""
    counted = [s for s in servers if s.state is not ServerState.OFFLINE and s.span.end <= blocks]
    counted.sort(key=lambda server: server.peer_id)
    return PlacementSnapshot(
        peers=tuple(server.peer_id for server in counted),
        starts=np.array([server.span.start for server in counted], dtype=np.int64),
        ends=np.array([server.span.end for server in counted], dtype=np.int64),
        rates=np.array([server.tokens_per_second for server in counted], dtype=np.float64),
        serving=np.array([server.state is ServerState.ONLINE for server in counted], dtype=np.bool_),
        mobility=np.array([server.mobility for server in counted], dtype=np.int64),
        blocks=blocks,
    )


@dataclass(frozen=True)
class MoveCandidate:
    """One server (its index) and the first of the blocks that it would move to."""

    server: int
    start: int


class PlacementState:
    """The swarm after the moves made so far. Rates are the believed ones (see `initial_blocks`).

    Each server moves at most once. One whose announced rate is not plausible, or that is still loading, is never the
    last that serves a block while others move.
    """

    def __init__(self, view: PlacementSnapshot, immovable: frozenset[str] = frozenset()) -> None:
        limit = plausible_rate(view.rates)
        self._peers, self._blocks = view.peers, view.blocks
        self._starts, self._ends, self._lengths = view.starts.copy(), view.ends.copy(), view.ends - view.starts
        self._rates = np.minimum(view.rates, limit)
        self._trusted = (view.serving & (view.rates <= limit)).astype(np.float64)
        self._movable = view.serving & (view.mobility >= Mobility.COOLING)
        if immovable:
            self._movable &= np.array([peer not in immovable for peer in view.peers], dtype=np.bool_)
        self._free = self._movable & (view.mobility == Mobility.FREE)
        self.throughputs = self._by_block(self._rates)
        self._holders = self._by_block(np.ones(len(view.peers)))
        self._staying = self._by_block(self._trusted)

    def _by_block(self, values: Floats) -> Floats:
        return sum_by_block(self._starts, self._ends, values, self._blocks)

    @property
    def gaps(self) -> list[int]:
        """Blocks that no server holds."""
        return np.flatnonzero(self._holders == 0).tolist()

    @property
    def weakest(self) -> float:
        """Tokens/s of the weakest block: the swarm's bottleneck."""
        return float(self.throughputs.min())

    @property
    def even_share(self) -> float:
        """Tokens/s of every block if all throughput were spread evenly; no placement does better."""
        return float((self._rates * self._lengths).sum()) / self._blocks

    def throughputs_without(self, candidate: MoveCandidate, throughputs: Floats) -> Floats:
        """The `throughputs` (tokens/s a block) while this server is away."""
        result = throughputs.copy()
        result[self._starts[candidate.server] : self._ends[candidate.server]] -= self._rates[candidate.server]
        return result

    def best_gap_closing_move(self) -> MoveCandidate | None:
        """The move that leaves fewest gaps, if any leaves fewer than there are; of equal ones the evenest."""
        gap_sums, lonely_sums = _prefix(self._holders == 0), _prefix(self._holders == 1)
        best, most_closed = None, 0.0
        # A window of the longest movable span holds no more gaps than this, so nothing better can follow.
        longest = int(self._lengths[self._movable].max(initial=0))
        limit = max((gap_sums[longest:] - gap_sums[: self._blocks + 1 - longest]).max(initial=0.0), 0.0)
        for block in self.gaps:
            candidates = _CandidateMoves(self, block, np.flatnonzero(self._movable & self._without_block(block)))
            closed = gap_sums[candidates.new_ends] - gap_sums[candidates.new_starts]
            opened = lonely_sums[candidates.left_ends] - lonely_sums[candidates.left_starts]
            net = closed - opened
            if net.size and net.max() > most_closed:
                best, most_closed = candidates.evenest(net == net.max()), net.max()
            if most_closed >= limit:
                break
        return best

    def best_raising_move(self, gain: float) -> MoveCandidate | None:
        """Of the moves that raise the weakest block, the evenest of those that leave no other below (1 + `gain`) of it.

        If there is none, of those that leave none as weak as it was. In the other order one weak block would be raised
        by making others nearly as weak, and so on for ever.
        """
        block = int(self.throughputs.argmin())
        floor = float(self.throughputs[block])
        weakest, fewest = _RangeMinimum(self.throughputs), _RangeMinimum(self._staying)
        old = weakest(self._starts, self._ends)
        dispensable = fewest(self._starts, self._ends) - self._trusted >= 1
        movable = self._free & dispensable
        target = floor * (1 + gain)
        for servers in self._most_promising(movable & self._without_block(block), old - self._rates > target, floor):
            candidates = _CandidateMoves(self, block, servers)
            left = weakest(candidates.left_starts, candidates.left_ends) - candidates.rates
            for allowed in (left > target, left > floor):
                if allowed.any():
                    return candidates.evenest(allowed)
        return None

    def _without_block(self, block: int) -> Flags:
        return (block < self._starts) | (self._ends <= block)

    def _most_promising(self, movable: Flags, spare: Flags, floor: float) -> Iterator[Ints]:
        """First those of the `movable` servers that are `spare`, however far they go, then all.

        Of many spare ones a few: those that even out most if all they come to is as weak as `floor`.
        """
        spare &= movable
        if spare.sum() > MAX_CANDIDATES:
            sums = _prefix(self.throughputs)
            gained = self._rates * self._lengths * (2 * floor + self._rates)
            held = sums[self._ends] - sums[self._starts]
            lost = self._rates * (2 * held - self._rates * self._lengths)
            yield np.sort(np.argpartition(np.where(spare, gained - lost, np.inf), MAX_CANDIDATES)[:MAX_CANDIDATES])
        elif spare.any():
            yield np.flatnonzero(spare)
        yield np.flatnonzero(movable)

    def apply_move(self, candidate: MoveCandidate) -> tuple[str, Span, Span]:
        """Let the server move. Returns its peer id, the blocks it leaves and those it takes."""
        server, start, end = candidate.server, candidate.start, candidate.start + int(self._lengths[candidate.server])
        old = Span(int(self._starts[server]), int(self._ends[server]))
        self.throughputs[old.start : old.end] -= self._rates[server]
        self._holders[old.start : old.end] -= 1
        self._staying[old.start : old.end] -= self._trusted[server]
        self._starts[server], self._ends[server] = start, end
        self.throughputs[start:end] += self._rates[server]
        self._holders[start:end] += 1
        self._movable[server] = self._free[server] = False
        return self._peers[server], old, Span(start, end)


class _CandidateMoves:
    """All candidates onto `block`: one entry for each of the `servers`, which do not hold it, and each window with it.

    Attributes:
        servers: index of the server.
        starts, ends, rates: what it has now.
        new_starts, new_ends: what it would have.
        left_starts, left_ends: the blocks it would leave, an empty range if none.
    """

    def __init__(self, placement: PlacementState, block: int, servers: Ints) -> None:
        p = placement
        lengths = p._lengths[servers]
        first = np.maximum(0, block - lengths + 1)
        count = np.minimum(block, p._blocks - lengths) - first + 1
        self.servers = np.repeat(servers, count)
        self.new_starts = np.arange(len(self.servers)) + np.repeat(first - (np.cumsum(count) - count), count)
        self.new_ends = self.new_starts + p._lengths[self.servers]
        self.starts, self.ends = p._starts[self.servers], p._ends[self.servers]
        self.rates = p._rates[self.servers]
        # The block lies on one side of what the server holds, so what it would leave is one range.
        forward = self.ends <= block
        self.left_starts = np.where(forward, self.starts, np.minimum(self.ends, np.maximum(self.starts, self.new_ends)))
        self.left_ends = np.where(forward, np.maximum(self.starts, np.minimum(self.ends, self.new_starts)), self.ends)
        self._sums = _prefix(p.throughputs)

    def evenest(self, allowed: Flags) -> MoveCandidate:
        """Of the `allowed` candidates (at least one), the one with the least sum of squared throughputs."""
        gained = self._sums[self.new_ends] - self._sums[self.new_starts]
        lost = self._sums[self.ends] - self._sums[self.starts]
        change = self.rates * (gained - lost) + self.rates**2 * (self.left_ends - self.left_starts)
        best = int(np.where(allowed, change, np.inf).argmin())
        return MoveCandidate(int(self.servers[best]), int(self.new_starts[best]))


def _prefix(values: NDArray[np.generic]) -> Floats:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))


class _RangeMinimum:
    """Minima of many ranges at once, from those of all ranges whose length is a power of two; infinite if empty."""

    def __init__(self, values: Floats) -> None:
        rows = [values]
        while 2 ** len(rows) <= len(values):
            half = 2 ** (len(rows) - 1)
            row = np.full(len(values), np.inf)
            row[:-half] = np.minimum(rows[-1][:-half], rows[-1][half:])
            rows.append(row)
        self._table = np.array(rows)
        # The exponent of the largest power of two that is not longer than the range.
        self._level = np.maximum(np.frexp(np.arange(len(values) + 1))[1] - 1, 0).astype(np.int64)

    def __call__(self, starts: Ints, ends: Ints) -> Floats:
        level = self._level[ends - starts]
        first = np.minimum(starts, self._table.shape[1] - 1)  # an empty range may start behind the last value
        minima = np.minimum(self._table[level, first], self._table[level, ends - 2**level])
        return np.where(ends > starts, minima, np.inf)
