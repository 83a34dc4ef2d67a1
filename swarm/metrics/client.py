"""What a client's sessions meet on their way, counted. Fed by the events of `swarm.client.routes.events`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Histogram

from swarm.metrics.instruments import ANSWER_SECONDS, OTHER, error_label
from swarm.metrics.registry import Registry

AVOIDED: Mapping[str, str] = {
    "could not be reached": "unreachable",
    "did not answer in time": "timed_out",
    "gave a wrong answer": "wrong_answer",
    "refused the request": "refused",
    "reported a fault of its own": "fault",
    "has no room in its cache": "cache_full",
    "is closing or moving": "closing",
}
"""Labels of the reasons of `swarm.routing.peer_health.Failure`, which lies above this room."""


class ClientMetrics:
    """Counts for all sessions of a process.

    Args:
        registry: where they are told.
    """

    def __init__(self, registry: Registry) -> None:
        self._routes = Counter("swarm_client_routes_total", "Routes taken, repairs included.", registry=registry)
        self._lost = Counter(
            "swarm_client_hops_lost_total", "Servers that failed a session, by error code.", ["code"], registry=registry
        )
        self._failovers = Histogram(
            "swarm_client_failover_seconds",
            "Time from noticing that a server is lost until others have taken its place.",
            buckets=ANSWER_SECONDS,
            registry=registry,
        )
        self._replays = Counter("swarm_client_replays_total", "Caches filled again from records.", registry=registry)
        self._replayed = Counter("swarm_client_replayed_tokens_total", "Tokens in those replays.", registry=registry)
        self._missing = Counter(
            "swarm_client_missing_blocks_total",
            "Times that a session found blocks that nobody holds.",
            registry=registry,
        )
        self._bans = Counter(
            "swarm_client_bans_total",
            "Servers kept out of routes for a while, by reason.",
            ["reason"],
            registry=registry,
        )
        self._by_event: Mapping[str, Callable[[Any], None]] = {
            "RouteTaken": lambda event: self._routes.inc(),
            "HopLost": lambda event: self._lost.labels(error_label(event.reason)).inc(),
            "Recovered": lambda event: self._failovers.observe(event.seconds),
            "Replayed": self._was_replayed,
            "BlocksMissing": lambda event: self._missing.inc(),
            "PeerAvoided": lambda event: self._bans.labels(AVOIDED.get(event.reason, OTHER)).inc(),
        }

    def heard(self, event: object) -> None:
        """Count an event. For any thread; a listener of `swarm.client.routes.events`.

        Events are told apart by the names of their classes, because they are made in a room above this one.
        """
        count = self._by_event.get(type(event).__name__)
        if count is not None:
            count(event)

    def _was_replayed(self, event: Any) -> None:
        self._replays.inc()
        self._replayed.inc(event.tokens)
