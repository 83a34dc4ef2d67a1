"""Metrics of a client's sessions, counted from the events of `swarm.client.routes.events`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm.metrics.registry import ANSWER_BUCKETS_S, OTHER, Instruments, Registry, error_label

BAN_REASONS: Mapping[str, str] = {
    "could not be reached": "unreachable",
    "did not answer in time": "timed_out",
    "gave a wrong answer": "wrong_answer",
    "refused the request": "refused",
    "reported a fault of its own": "fault",
    "has no room in its cache": "cache_full",
    "is closing or moving": "closing",
    "gave an answer with NaN or infinity, or caused one": "suspected",
}
"""Labels for the reasons of `swarm.routing.peer_health.PeerFailure`, which this package must not import."""

DRAFTS = ("copies", "model", "head")
"""Labels of drafts; others are a caller's own."""


class ClientMetrics:
    """Metrics of all sessions of a process.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: Registry) -> None:
        new = Instruments(registry, "swarm_client")
        self._routes = new.counter("routes_total", "Routes taken, repairs included.")
        self._lost = new.counter("hops_lost_total", "Servers that failed a session, by error code.", "code")
        lost = "Time from noticing that a server is lost until others have taken its place."
        self._failovers = new.histogram("failover_seconds", lost, ANSWER_BUCKETS_S)
        self._replays = new.counter("replays_total", "Caches filled again from records.")
        self._replayed = new.counter("replayed_tokens_total", "Tokens in those replays.")
        self._missing = new.counter("missing_blocks_total", "Times that a session found blocks that no server holds.")
        self._bans = new.counter("bans_total", "Servers kept out of routes for a while, by reason.", "reason")
        left = "Guesses from tokens that left early, by the block in front of which they did."
        self._exits = new.counter("exits_total", left, "block")
        verified = "Guesses that the full model verified, by whether they stood."
        self._verified = new.counter("exits_verified_total", verified, "block", "outcome")
        guessed = "Guesses of speculative decoding that were verified, by draft and whether they stood."
        self._guesses = new.counter("guesses_total", guessed, "draft", "outcome")
        compared = "Servers whose results were compared with others, by outcome."
        self._audits = new.counter("audits_total", compared, "outcome")
        self._by_event: Mapping[str, Callable[[Any], None]] = {
            "RouteTaken": lambda event: self._routes.inc(),
            "HopLost": lambda event: self._lost.labels(error_label(event.reason)).inc(),
            "Recovered": lambda event: self._failovers.observe(event.seconds),
            "Replayed": self._was_replayed,
            "BlocksMissing": lambda event: self._missing.inc(),
            "Audited": lambda event: self._audits.labels("agreed" if event.agreed else "differed").inc(),
            "ExitTaken": lambda event: self._exits.labels(str(event.block)).inc(),
            "ExitVerified": lambda event: self._verified.labels(
                str(event.block), "stood" if event.stands else "given_up"
            ).inc(),
            "GuessVerified": lambda event: self._guesses.labels(
                event.draft if event.draft in DRAFTS else OTHER, "stood" if event.stands else "given_up"
            ).inc(),
            "PromptComputed": lambda event: None,  # progress, of tokens that are counted elsewhere
            "PeerAvoided": lambda event: self._bans.labels(BAN_REASONS.get(event.reason, OTHER)).inc(),
        }

    def on_event(self, event: object) -> None:
        """Count an event. A listener of `swarm.client.routes.events`, safe to call from any thread.

        Events are distinguished by class name, because this package must not import the package that defines them.
        """
        count = self._by_event.get(type(event).__name__)
        if count is not None:
            count(event)

    def _was_replayed(self, event: Any) -> None:
        self._replays.inc()
        self._replayed.inc(event.tokens)
