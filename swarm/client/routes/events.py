"""What happens to a client's sessions on their way through the swarm, for those who show or count it.

Listeners are called in the thread of the network; they must be quick, and may not use the session from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.data_structures import Route, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouteTaken:
    """The session goes by this route from now on."""

    route: Route


@dataclass(frozen=True)
class HopLost:
    """A server of the route is used no more; another one is looked for.

    Attributes:
        span: the blocks that it computed.
        reason: code of the error, see `swarm.errors.RemoteError`.
    """

    peer_id: str
    span: Span
    reason: str


@dataclass(frozen=True)
class Replayed:
    """A server's caches were filled again from the session's record.

    Attributes:
        tokens: of all rows.
    """

    span: Span
    tokens: int


@dataclass(frozen=True)
class BlocksMissing:
    """Nobody holds these blocks at present; the session waits for a server."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Recovered:
    """Other servers took the place of one that was lost, so many seconds after the session noticed."""

    seconds: float


@dataclass(frozen=True)
class PeerAvoided:
    """A server is kept out of routes for so many seconds.

    Attributes:
        reason: a value of `swarm.routing.peer_health.Failure`.
    """

    peer_id: str
    reason: str
    seconds: float


SessionEvent = RouteTaken | HopLost | Replayed | BlocksMissing | Recovered | PeerAvoided
EventListener = Callable[[SessionEvent], None]


def ignore_events(event: SessionEvent) -> None:
    """The listener where nobody listens."""


def broadcast(listeners: Iterable[EventListener]) -> EventListener:
    """One listener that tells several. What one of them raises is logged, and harms neither session nor others."""

    def tell(event: SessionEvent) -> None:
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed at %s", type(event).__name__)

    return tell
