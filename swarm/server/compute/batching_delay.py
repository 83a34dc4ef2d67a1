"""How long an iteration should wait for more sessions to join it. Pure: what happens is told, the answer is seconds.

Reading the weights costs about the same for one row as for several, so sessions that are computed together cost one
iteration instead of several. But who waits for others loses that time. A session that was answered comes again when its
token has been round the other servers and its client, each time after about as long; so it is known who is about to
come, and an iteration waits as long as that shortens the waiting of all together.

Suppose `w` requests wait, `n` more come within `d` seconds, and an iteration takes `T`. If nobody waits, each of the
`n` finds the server at work, for `T` less the time until it came. If all wait, they start in `d` seconds. The
difference, summed over all of them, is `n T - (w + n) d`.

Where other programs want the same processors (other servers, the clients), an iteration that is avoided is theirs as
well: every session that is about, wherever it is, goes on `T` sooner. Sessions that have come together stay together,
as they are answered at the same time; so a server waits longer for that, up to `MAX_DELAY_ITERATIONS` iterations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_DELAY_S = 0.1
"""Seconds. A slow server computes for seconds; who is due that late may come much later."""

MAX_DELAY_ITERATIONS = 3.0
"""Iterations to wait at most, on a machine that has other work; one otherwise."""

SESSION_EXPECTED_S = 2.0
"""Seconds since its last answer, after which a session is not expected any more."""

MIN_DELAY_ITERATIONS = 0.05
"""Part of an iteration: times are not known better."""


def best_delay(waiting: int, coming: Sequence[float], iteration: float, elsewhere: float = 0.0) -> float:
    """Seconds to wait so that all together lose least.

    Args:
        waiting: requests that wait.
        coming: in how many seconds others are expected, ascending.
        iteration: seconds that it takes.
        elsewhere: sessions that are held up by an iteration although they are not here.
    """
    best, result = 0.0, 0.0
    for more, seconds in enumerate(coming, 1):
        gain = (more + elsewhere) * iteration - (waiting + more) * seconds
        if gain > best:
            best, result = gain, seconds
    return result


@dataclass(slots=True)
class _SessionTiming:
    """Attributes:
    answered: when it was answered last; None while it waits for an answer.
    away: seconds from that to its next request, the last time; None before it has come twice.
    """

    answered: float | None = None
    away: float | None = None


@dataclass
class BatchingDelay:
    """When each session is expected.

    Attributes:
        iteration: seconds that the last iteration of short requests took.
    """

    _sessions: dict[Hashable, _SessionTiming] = field(default_factory=dict)
    iteration: float = 0.0

    @property
    def sessions(self) -> int:
        """Sessions that are about."""
        return len(self._sessions)

    def came(self, session: Hashable, now: float) -> None:
        """A session wants a step."""
        known = self._sessions.setdefault(session, _SessionTiming())
        if known.answered is not None:
            known.away, known.answered = now - known.answered, None

    def answered(self, session: Hashable, now: float) -> None:
        """A session has got what it wanted, or never will."""
        known = self._sessions.pop(session, None) or _SessionTiming()
        known.answered = now
        self._sessions[session] = known  # at the end: those that were answered longest ago come first
        for gone in [*self._gone(now)]:
            del self._sessions[gone]

    def computed(self, seconds: float) -> None:
        """An iteration of short requests is over."""
        self.iteration = seconds

    def patience(self, waiting: int, waited: float, crowded: float, now: float) -> float:
        """Seconds to wait for others; 0 if it is better to begin.

        Args:
            waiting: sessions that wait.
            waited: seconds that this iteration has been put off already.
            crowded: how much other work the machine has, 0 to 1.
        """
        left = min(MAX_DELAY_S, self.iteration * (1 + crowded * (MAX_DELAY_ITERATIONS - 1))) - waited
        if left <= 0:
            return 0.0
        elsewhere = crowded * self.sessions
        return min(left, best_delay(waiting, sorted(self._coming(now)), self.iteration, elsewhere))

    def _coming(self, now: float) -> Iterator[float]:
        for one in self._sessions.values():
            if one.answered is not None and one.away is not None:
                # One that is late is expected to be as late again: nothing else is known of it.
                yield max(MIN_DELAY_ITERATIONS * self.iteration, abs(one.answered + one.away - now))

    def _gone(self, now: float) -> Iterator[Hashable]:
        for session, known in self._sessions.items():
            if known.answered is not None:
                if now - known.answered <= SESSION_EXPECTED_S:
                    return
                yield session
