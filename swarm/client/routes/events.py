"""Events of a client's sessions, for listeners that show or count them.

Listeners are called in the network thread. They must return quickly and must not use the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.data_structures import Route, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouteTaken:
    """The session takes this route from now on."""

    route: Route


@dataclass(frozen=True)
class HopLost:
    """The session has left a server of its route. Another one takes its place, or already has.

    Attributes:
        peer_id: the server.
        span: the blocks that it computed.
        reason: the code of the error, see `swarm.errors.RemoteError`; "late" or "slow" if others took its place before
            it failed.
    """

    peer_id: str
    span: Span
    reason: str


@dataclass(frozen=True)
class Replayed:
    """A server's caches have been refilled from the session's input history.

    Attributes:
        span: the server's blocks.
        tokens: number of tokens of all sequences.
    """

    span: Span
    tokens: int


@dataclass(frozen=True)
class BlocksMissing:
    """No server offers these blocks; the session waits for one."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Recovered:
    """Other servers have replaced a lost one, `seconds` after the session noticed the loss."""

    seconds: float


@dataclass(frozen=True)
class PromptComputed:
    """The last server has answered one of several chunks of a step: the longest sequence has so many tokens now."""

    tokens: int


@dataclass(frozen=True)
class PeerAvoided:
    """A server is kept out of routes for `seconds`.

    Attributes:
        peer_id: the server.
        reason: a value of `swarm.routing.peer_health.PeerFailure`.
    """

    peer_id: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Audited:
    """A server's work was computed again elsewhere, for this client.

    Attributes:
        peer_id: a server that took part.
        span: the blocks.
        agreed: whether it has computed what others make of the same inputs.
        suspicion: the probability, from all audits so far, that it does not compute what it announces.
    """

    peer_id: str
    span: Span
    agreed: bool
    suspicion: float


@dataclass(frozen=True)
class ExitTaken:
    """A token has left in front of `block`: its successor was guessed there.

    Comes again for the same token when a later copy replaces the guess.
    """

    block: int


@dataclass(frozen=True)
class ExitVerified:
    """The full model's answer to a token that had left.

    Attributes:
        block: in front of which it left.
        stands: whether its successor stands; else all behind it was given up.
    """

    block: int
    stands: bool


@dataclass(frozen=True)
class GuessVerified:
    """The model's answer to a guess of speculative decoding.

    Attributes:
        draft: what has made it: "model", "copies", "head", or the name of one of the caller's own.
        stands: whether its token stands; else all behind it was given up.
    """

    draft: str
    stands: bool


SessionEvent = (
    RouteTaken
    | HopLost
    | Replayed
    | BlocksMissing
    | Recovered
    | PromptComputed
    | PeerAvoided
    | Audited
    | ExitTaken
    | ExitVerified
    | GuessVerified
)
EventListener = Callable[[SessionEvent], None]


def ignore_events(event: SessionEvent) -> None:
    """A listener that does nothing."""


def broadcast(listeners: Iterable[EventListener]) -> EventListener:
    """A listener that calls several listeners. An exception of one of them is logged; the others are still called."""

    def emit(event: SessionEvent) -> None:
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("an event listener failed on %s", type(event).__name__)

    return emit
