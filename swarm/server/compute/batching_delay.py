"""How long an iteration should wait for more sessions to join it. Pure: events come in, a number of seconds comes out.

An iteration costs about the same for one sequence as for several. A session comes back after about the same interval
each time, so the next arrivals are known, and an iteration waits as long as that shortens the total waiting time.

Suppose that `w` requests wait, `n` more arrive within `d` seconds, and an iteration takes `T`. Without a delay, each of
the `n` finds the server busy, for `T` minus the time until it arrived. With a delay, all start after `d` seconds. The
difference, summed over all requests, is `n T - (w + n) d`.

Where other programs compete for the same processors (other servers, the clients), an iteration that is avoided helps
them too: every active session continues `T` sooner, and a server waits up to `MAX_DELAY_ITERATIONS`. It starts when its
share of the sessions is there, so that these travel in as many groups as the machine has processors for: each is as
large as it can be while no processor is idle.

An iteration of requests that are not urgent starts only if it ends before an urgent session is expected, which would
have to wait for it. One of urgent requests does not wait for others.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from swarm.common.machine import ProcessorUse
from swarm.data_structures import Span
from swarm.server.compute.scheduler import may_share_pass

MAX_DELAY_S = 0.1
"""Longest delay. A slow server computes for seconds, and sessions expected that late may come much later."""

MAX_DELAY_ITERATIONS = 3.0
"""Longest delay, in iterations, on a machine that is busy with other work. On an idle machine it is one iteration."""

SESSION_EXPECTED_S = 2.0
"""A session that has not come back for this long after its last answer is not expected any more."""

MIN_DELAY_ITERATIONS = 0.05
"""Arrival times are known with this precision, in iterations."""


def best_delay(waiting: int, arrivals: Sequence[float], iteration: float, groups: int = 0) -> float:
    """The delay in seconds with which all requests together lose the least time.

    Args:
        waiting: number of requests that wait already.
        arrivals: seconds until each further request is expected, ascending.
        iteration: duration of an iteration in seconds.
        groups: how many iterations the machine can compute at the same time, if processes compete for it; then an
            iteration holds up all sessions, and is not delayed for more than one of so many equal groups. Otherwise 0.
    """
    sessions = waiting + len(arrivals)
    group, held_up = (-(-sessions // groups), sessions) if groups else (sessions, 0)
    best, result = 0.0, 0.0
    for more, seconds in enumerate(arrivals[: max(0, group - waiting)], 1):
        gain = (more + held_up) * iteration - (waiting + more) * seconds
        if gain > best:
            best, result = gain, seconds
    return result


@dataclass(slots=True)
class _SessionTiming:
    """When a session was answered, how long it stays away, and what its last request was like.

    Attributes:
        answered: time of its last answer; None while it waits for one.
        away: seconds between the last answer and the request after it; None until it has come twice.
    """

    span: Span
    joins_parts: bool
    answered: float | None = None
    away: float | None = None
    urgent: bool = True


@dataclass
class BatchingDelay:
    """Predicts when each session comes back, and how long the next iteration should wait for them.

    Attributes:
        iteration: seconds that the last iteration of short requests took.
    """

    _sessions: dict[Hashable, _SessionTiming] = field(default_factory=dict)
    iteration: float = 0.0

    @property
    def sessions(self) -> int:
        """Number of active sessions."""
        return len(self._sessions)

    def on_request(
        self, session: Hashable, now: float, span: Span, joins_parts: bool = False, urgent: bool = True
    ) -> None:
        """A session has sent a request for these blocks."""
        known = self._sessions.setdefault(session, _SessionTiming(span, joins_parts))
        known.span, known.joins_parts, known.urgent = span, joins_parts, urgent
        if known.answered is not None:
            known.away, known.answered = now - known.answered, None

    def on_answer(self, session: Hashable, now: float) -> None:
        """A session's request has been answered or has failed."""
        known = self._sessions.pop(session, None)
        if known is None:  # forgotten since
            return
        known.answered = now
        self._sessions[session] = known  # at the end: those that were answered longest ago come first
        for inactive in [*self._inactive(now)]:
            del self._sessions[inactive]

    def on_iteration(self, seconds: float) -> None:
        """An iteration of short requests has taken this long."""
        self.iteration = seconds

    def delay(
        self,
        waiting: int,
        waited: float,
        groups: int,
        now: float,
        span: Span,
        joins_parts: bool = False,
        yielding: int = 0,
    ) -> float:
        """Seconds to wait for more sessions; 0 if it is better to start now.

        Args:
            waiting: number of sessions that wait, with urgent requests.
            waited: seconds by which this iteration has been delayed already.
            groups: how many iterations the machine can compute at the same time, if processes compete for it;
                otherwise 0.
            span: the blocks of the request that decides which blocks the iteration computes.
            joins_parts: whether that request may share an iteration with requests for overlapping blocks.
            yielding: number of sessions that wait, with requests that are not urgent.
        """
        left = min(MAX_DELAY_S, self.iteration * (MAX_DELAY_ITERATIONS if groups else 1)) - waited
        if left <= 0:
            return 0.0
        expected = list(self._expected(now))
        joining = [
            (seconds, timing)
            for seconds, timing in expected
            if may_share_pass(span, joins_parts, timing.span, timing.joins_parts)
        ]
        if waiting:
            urgent = sorted(seconds for seconds, timing in joining if timing.urgent)
            return min(left, best_delay(waiting, urgent, self.iteration, groups))
        held_up = sorted(seconds for seconds, timing in expected if timing.urgent)
        like = sorted(seconds for seconds, _ in joining)
        return min(
            left, max(best_delay(0, held_up, self.iteration), best_delay(yielding, like, self.iteration, groups))
        )

    def _expected(self, now: float) -> Iterator[tuple[float, _SessionTiming]]:
        """In how many seconds each session that is away is expected."""
        for timing in self._sessions.values():
            if timing.answered is not None and timing.away is not None:
                # A session that is late is expected to be late by as much again: nothing else is known about it.
                yield max(MIN_DELAY_ITERATIONS * self.iteration, abs(timing.answered + timing.away - now)), timing

    def _inactive(self, now: float) -> Iterator[Hashable]:
        for session, timing in self._sessions.items():
            if timing.answered is not None:
                if now - timing.answered <= SESSION_EXPECTED_S:
                    return
                yield session


SAMPLE_PERIOD_S = 0.5
"""Seconds between measurements."""

CONTENDED_USE = 0.6
"""Share of all processors in use from which programs compete for them. Where programs take turns, as a chain of servers
on one machine does, some processor is idle most of the time."""

OWN_USE_SHARE = 0.8
"""Above this share of the processor time in use, this process is the one that uses the machine."""


def is_contended(used: float, own: float) -> bool:
    """Whether other programs want the processors as well.

    Args:
        used: share of all processors in use.
        own: share of all processors that this process uses.
    """
    return used > CONTENDED_USE and own <= OWN_USE_SHARE * used


class CpuContentionMeter:
    """Measures CPU contention, at most once per `SAMPLE_PERIOD_S`, whenever it is asked."""

    def __init__(self) -> None:
        self._use = ProcessorUse()
        self._measured_at = -SAMPLE_PERIOD_S
        self._groups = 0

    def groups(self, threads: int) -> int:
        """How many iterations the machine can compute at the same time, if processes compete for it; otherwise 0.

        Args:
            threads: how many threads an iteration uses.
        """
        now = time.monotonic()
        if now - self._measured_at >= SAMPLE_PERIOD_S:
            self._measured_at = now
            contended = is_contended(*self._use.shares())
            self._groups = max(1, (psutil.cpu_count() or 1) // threads) if contended else 0
            self._use = ProcessorUse()
        return self._groups
