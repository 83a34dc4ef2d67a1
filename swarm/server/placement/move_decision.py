"""Whether this server should move to other blocks. Pure: from announcements to a plan, from the plan to a decision.

Every server makes the same plan from the same announcements: it lets the best mover of the whole swarm move, then the
next best, and so on (Petals, section 3.2: nodes check periodically whether rebalancing would improve the throughput
enough). A server moves if the plan has a move for it. No coordination is needed, and no server chases a move that
another one makes.

Rules of a plan:
- Each move goes to the weakest block and leaves no block as weak as that one was, so the weakest blocks only get
  better and repeated plans come to an end. Of such moves the one that evens out the throughputs most is taken.
- While every block is held, no move takes away the last server of a block, not even while it loads: servers that are
  still loading do not count as holders, nor do those whose announced rate is not plausible.
- While every block is held, moves are made only if the weakest block gains `min_gain` by them and if what they gain in
  `horizon` pays for what is lost during `load_seconds`.
- While no server holds some block, the model does not run at all, so every move is right that closes more gaps than it
  opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm.data_structures import ServerInfo, Span
from swarm.errors import format_blocks
from swarm.server.placement.best_move import PlacementSnapshot, PlacementState, take_snapshot

ROUNDING_TOLERANCE = 1e-6
"""A relative gain below this may be a rounding error, from sums in another order."""


@dataclass(frozen=True)
class MovePolicy:
    """When a move is worth making. Times in seconds.

    Attributes:
        min_gain: relative growth of the swarm's bottleneck throughput that is needed (hysteresis).
        cool_down: how long a server that has moved stays, unless there is a gap to close.
        load_seconds: how long a moving server is away.
        horizon: how long the gain is expected to last.
        check_period: how often each server checks. A plan leaves out servers that should have moved for 1.5 periods.
        max_moves: moves of one plan, if they gain enough; else it may have twice as many and one for each 32 servers.
    """

    min_gain: float = 0.03
    cool_down: float = 600.0
    load_seconds: float = 60.0
    horizon: float = 1800.0
    check_period: float = 30.0
    max_moves: int = 32

    @property
    def overdue_after(self) -> float:
        return 1.5 * self.check_period


@dataclass(frozen=True)
class PlannedMove:
    """One server's move from its blocks to others; `closes_gap` if no server held some of those."""

    peer_id: str
    old: Span
    new: Span
    closes_gap: bool


@dataclass(frozen=True)
class MovePlan:
    """The moves that would help the whole swarm.

    Attributes:
        moves: the best first; each server at most once.
        reason: why there are these moves or none, for the log.
    """

    moves: tuple[PlannedMove, ...]
    reason: str


@dataclass(frozen=True)
class MoveHistory:
    """What a server remembers between checks.

    Attributes:
        moved_at: when it last moved (or joined); None if it never did.
        expected: peer id -> (since when it was expected to move, from where).
    """

    moved_at: float | None = None
    expected: Mapping[str, tuple[float, Span]] = field(default_factory=dict)

    def is_cooling_down(self, now: float, policy: MovePolicy) -> bool:
        """Whether the server has moved so recently that it stays, unless there is a gap to close."""
        return self.moved_at is not None and now - self.moved_at < policy.cool_down

    def overdue_servers(self, now: float, policy: MovePolicy) -> frozenset[str]:
        """Servers to plan without: they were expected to move and did not. They may have died.

        They are planned with again after a cool-down.
        """
        ages = {peer_id: now - since for peer_id, (since, _) in self.expected.items()}
        return frozenset(
            p for p, age in ages.items() if policy.overdue_after <= age < policy.overdue_after + policy.cool_down
        )

    def expecting_moves(self, plan: MovePlan, me: str, now: float, policy: MovePolicy) -> MoveHistory:
        """The history with the moves of `plan` expected; servers that are long overdue are forgotten."""
        overdue = self.overdue_servers(now, policy)
        kept = {peer_id: self.expected[peer_id] for peer_id in overdue}
        for move in plan.moves:
            if move.peer_id != me:
                since, old = self.expected.get(move.peer_id, (now, move.old))
                age = now - since
                kept[move.peer_id] = (since, old) if old == move.old and age < policy.overdue_after else (now, move.old)
        return replace(self, expected=kept)


@dataclass(frozen=True)
class MoveDecision:
    """Whether and where this server moves.

    Attributes:
        span: the blocks to move to; None to stay.
        reason: for the log.
        history: to pass to the next check.
        closes_gap: whether no server holds some of these blocks now.
    """

    span: Span | None
    reason: str
    history: MoveHistory
    closes_gap: bool = False


def decide_move(
    servers: Iterable[ServerInfo],
    me: str,
    blocks: int,
    now: float,
    history: MoveHistory,
    policy: MovePolicy,
) -> MoveDecision:
    """Whether and where the server `me` should move.

    Args:
        servers: as fetched from the DHT.
        me: peer id; a server that is not announced, or not online, stays.
        blocks: of the model.
        now: seconds, on the clock that `history` is kept in.
        history: what the last decision returned.
    """
    plan = plan_moves(take_snapshot(servers, blocks), policy, history.overdue_servers(now, policy) - {me})
    return decide_from_plan(plan, me, now, history, policy)


def decide_from_plan(plan: MovePlan, me: str, now: float, history: MoveHistory, policy: MovePolicy) -> MoveDecision:
    """What a plan means for the server `me`."""
    history = history.expecting_moves(plan, me, now, policy)
    mine = next((move for move in plan.moves if move.peer_id == me), None)
    if mine is None:
        better = "; better placed than this server: " + ", ".join("…" + m.peer_id[-6:] for m in plan.moves[:3])
        return MoveDecision(None, plan.reason + (better if plan.moves else ""), history)
    if history.is_cooling_down(now, policy) and not mine.closes_gap:
        return MoveDecision(None, f"{plan.reason}; this server moved a short while ago and stays for now", history)
    return MoveDecision(mine.new, plan.reason, replace(history, moved_at=now), mine.closes_gap)


def plan_moves(view: PlacementSnapshot, policy: MovePolicy, immovable: frozenset[str] = frozenset()) -> MovePlan:
    """The greedy moves of the whole swarm, best first; see the rules above.

    Args:
        view: the swarm as announced.
        policy: when moving is worth it.
        immovable: peer ids of servers to plan without; those that are loading never move.
    """
    placement = PlacementState(view, immovable)
    gaps = placement.gaps
    if not gaps:
        return MovePlan(*_even_out(placement, policy, len(view.peers)))
    found = f"no server holds blocks {format_blocks(gaps)}"
    closing: list[PlannedMove] = []
    while len(closing) < policy.max_moves and (candidate := placement.best_gap_closing_move()) is not None:
        closing.append(PlannedMove(*placement.apply_move(candidate), closes_gap=True))
    if placement.gaps:
        return MovePlan(tuple(closing), found if closing else f"{found} and no server can be spared for them")
    evening, why = _even_out(placement, policy, len(view.peers))
    # Whichever server gets to those blocks first closes the gap, whatever the plan moved it for.
    evening = tuple(replace(move, closes_gap=any(block in move.new for block in gaps)) for move in evening)
    return MovePlan((*closing, *evening), f"{found}; with them held {why}")


def _even_out(placement: PlacementState, policy: MovePolicy, servers: int) -> tuple[tuple[PlannedMove, ...], str]:
    """Moves that raise the weakest block enough, and the reason for them or for none."""
    before = best = placement.weakest
    enough = before * (1 + max(policy.min_gain, ROUNDING_TOLERANCE))
    state = f"the weakest block does {before:.4g} of at most {placement.even_share:.4g} tokens/s"
    if placement.even_share < enough:
        return (), state
    during = placement.throughputs
    moves: list[PlannedMove] = []
    best_count, lost = 0, 0.0
    while (candidate := placement.best_raising_move(policy.min_gain)) is not None:
        during = placement.throughputs_without(candidate, during)
        moves.append(PlannedMove(*placement.apply_move(candidate), closes_gap=False))
        if placement.weakest > best:
            best, best_count, lost = placement.weakest, len(moves), before - float(during.min())
        if len(moves) >= (policy.max_moves if best >= enough else 2 * policy.max_moves + servers // 32):
            break
    if best_count == 0 or best < enough:
        return (), f"{state}, and moves would not raise it by {policy.min_gain:.0%}"
    if (best - before) * policy.horizon <= lost * policy.load_seconds:
        return (), f"{state}, and more would be lost by loading than gained"
    return tuple(moves[:best_count]), f"{state}, and {best_count} moves raise it to {best:.4g}"
