"""How many steps to send off before they are verified together, where both sides of a boundary share one processor.

Behind the boundary, the server holds steps until the client waits for them, and then computes them as one, which takes
little longer than one of them (`swarm.server.sessions.pushing`). So a group of k steps costs the blocks in front of the
boundary k times and those behind it once, and gives 1 + p + ... + p^(k-1) tokens if a guess stands with probability p:
speculative decoding with the model's first blocks as its draft (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023, section 3.3). A group ends early at a token that does not leave.

Pure: times are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_GROUP = 16
"""Most steps of a group: those that a server computes as one."""

MIN_GAIN = 1.05
"""By how much groups have to be quicker than single steps."""

KEPT_SHARE = 0.8
"""What the next observation leaves of the average of those before."""

TRIED_EVERY = 24
"""One in so many groups is of two steps where single steps are quicker, and the other way round: that may change."""

ASSUMED = 0.5
"""Probability that a token leaves, and that its successor stands, before any did."""

FIRST_SIZES = (2, 1, 2, 1)
"""Sizes of the first groups, from which the times follow."""


@dataclass(frozen=True)
class StepTimes:
    """Average seconds from sending a step off until the next one of the text is sent off.

    Attributes:
        left: of a step that is held at the boundary, where its token leaves.
        stayed: of one that is held, whose token then does not leave: its group is verified at once.
        alone: of one that is not held, and the only one of its group.
        last: of one that is not held, and the last one of its group.
    """

    left: float
    stayed: float
    alone: float
    last: float


def tokens_per_second(size: int, leaves: float, stands: float, times: StepTimes) -> float:
    """What groups of up to `size` steps give.

    Args:
        leaves: probability that a token leaves where it may.
        stands: probability that the successor of a token that left stands.
    """
    if size == 1:
        return 1 / times.alone
    tokens = seconds = 0.0
    for number in range(size):
        sent = leaves**number  # the probability that the group becomes so long
        tokens += sent * stands**number
        is_last = number == size - 1
        seconds += sent * (times.last if is_last else leaves * times.left + (1 - leaves) * times.stayed)
    return tokens / seconds


def best_group_size(leaves: float, stands: float, times: StepTimes) -> int:
    """The quickest size of groups; 1 if none is quicker by `MIN_GAIN` than sending no token off early."""
    best = max(range(1, MAX_GROUP + 1), key=lambda size: tokens_per_second(size, leaves, stands, times))
    gain = tokens_per_second(best, leaves, stands, times) * times.alone
    return best if gain >= MIN_GAIN else 1


class GroupMeter:
    """Averages of one session, and what follows from them for its next group."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._leaves = self._stands = ASSUMED
        self._groups = 0
        self._since_tried = 0

    def on_held(self, seconds: float, left: bool) -> None:
        """The next step was sent off so long after one that was held, and whose token left, or did not."""
        self._leaves = _averaged(self._leaves, float(left))
        self._observe("left" if left else "stayed", seconds)

    def on_last(self, seconds: float, size: int) -> None:
        """The next step was sent off so long after the last one of a group of `size`, which was not held."""
        self._observe("alone" if size == 1 else "last", seconds)

    def on_verified(self, stands: bool) -> None:
        """The successor of a token that left stands, or does not."""
        self._stands = _averaged(self._stands, float(stands))

    def next_size(self) -> int:
        """How many steps the next group should have at most. Where that is 1, no token leaves."""
        self._groups += 1
        if self._groups <= len(FIRST_SIZES):
            return FIRST_SIZES[self._groups - 1]
        best = best_group_size(self._leaves, self._stands, self._times())
        self._since_tried = (self._since_tried + 1) % TRIED_EVERY
        if self._since_tried == 0:
            return 2 if best == 1 else 1
        return best

    def _times(self) -> StepTimes:
        """What was measured; what was not, as long as a single step if that is all that is known."""
        alone = self._seconds.get("alone", max(self._seconds.values(), default=1.0))
        left = self._seconds.get("left", alone)
        last = self._seconds.get("last", alone)
        return StepTimes(left, self._seconds.get("stayed", left + last), alone, last)

    def _observe(self, kind: str, seconds: float) -> None:
        before = self._seconds.get(kind)
        self._seconds[kind] = seconds if before is None else _averaged(before, seconds)


def _averaged(before: float, value: float) -> float:
    return KEPT_SHARE * before + (1 - KEPT_SHARE) * value
