"""How many steps to send off before they are verified together, where both sides of a boundary share one processor.

Behind the boundary, the server holds steps until the client waits for them, and then computes them as one, which takes
little longer than one of them (`swarm.server.sessions.pushing`). So a group of k steps costs the blocks in front of the
boundary k times and those behind it once, and gives 1 + p + ... + p^(k-1) tokens if a guess stands with probability p:
speculative decoding with the model's first blocks as its draft (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023, section 3.3). A group ends early at a token that does not leave.

Pure: times are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_GROUP = 16
"""Most steps of a group: those that a server computes as one."""

MIN_GAIN = 1.05
"""By how much groups have to be quicker than single steps."""

NEWEST_SHARE = 0.2
"""Of the newest observation in an average, once there are more than its inverse."""

TRIED_EVERY = 24
"""One in so many groups is of two steps where single steps are quicker, and the other way round: that may change."""

ASSUMED = 0.5
"""Probability that a token leaves, and that its successor stands, which counts like one observation."""

FIRST_SIZES = (1, 2, 1, 2)
"""Sizes of the first groups, from which the times follow."""


@dataclass(frozen=True)
class GroupTimes:
    """Seconds from the first step of a group to the first one of the next.

    Attributes:
        single: of a group of one.
        further: more for each further step.
        recall: more where the last step was held, because its token does not leave: the server is told.
    """

    single: float
    further: float
    recall: float


def tokens_per_second(size: int, leaves: float, stands: float, times: GroupTimes) -> float:
    """What groups of up to `size` steps give.

    Args:
        leaves: probability that a token leaves where it may.
        stands: probability that the successor of a token that left stands.
    """
    tokens = sum((leaves * stands) ** number for number in range(size))
    further = sum(leaves**number for number in range(1, size))
    recalled = 1 - leaves ** (size - 1)
    return tokens / (times.single + further * times.further + recalled * times.recall)


def best_group_size(leaves: float, stands: float, times: GroupTimes) -> int:
    """The quickest size of groups; 1 if none is quicker by `MIN_GAIN` than sending no token off early."""
    rates = [tokens_per_second(size, leaves, stands, times) for size in range(1, MAX_GROUP + 1)]
    best = max(range(MAX_GROUP), key=rates.__getitem__)
    return best + 1 if rates[best] >= MIN_GAIN * rates[0] else 1


@dataclass
class _Average:
    """The mean of the first observations, in which later ones then fade."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(NEWEST_SHARE, 1 / self.count) * (value - self.value)


@dataclass
class GroupMeter:
    """Averages of one session, and what follows from them for its next group."""

    _leaves: _Average = field(default_factory=lambda: _Average(ASSUMED, 1))
    _stands: _Average = field(default_factory=lambda: _Average(ASSUMED, 1))
    _single: _Average = field(default_factory=_Average)
    _further: _Average = field(default_factory=_Average)
    _recall: _Average = field(default_factory=_Average)
    _groups: int = 0

    def on_look(self, leaves: bool) -> None:
        """A token that may leave does, or does not."""
        self._leaves.add(float(leaves))

    def on_verified(self, stands: bool) -> None:
        """The successor of a token that left stands, or does not."""
        self._stands.add(float(stands))

    def on_group(self, size: int, seconds: float, recalled: bool) -> None:
        """A group of `size` steps has taken so long; `recalled` if the last one was held."""
        more = seconds - self._single.value
        if recalled:
            if self._single.count:
                self._recall.add(max(0.0, more - (size - 1) * self._further.value))
        elif size == 1:
            self._single.add(seconds)
        elif self._single.count:
            self._further.add(max(0.0, more / (size - 1)))

    def next_size(self) -> int:
        """How many steps the next group should have at most. Where that is 1, no token leaves."""
        self._groups += 1
        if self._groups <= len(FIRST_SIZES):
            return FIRST_SIZES[self._groups - 1]
        times = GroupTimes(self._single.value, self._further.value, self._recall.value)
        best = best_group_size(self._leaves.value, self._stands.value, times)
        if self._groups % TRIED_EVERY == 0:
            return 2 if best == 1 else 1
        return best
