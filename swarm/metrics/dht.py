"""Metrics of a bootstrap peer, computed when they are read."""

from __future__ import annotations

from collections.abc import Callable

from swarm.metrics.registry import Instruments, Registry


class BootstrapMetrics:
    """Gauges of one bootstrap peer, and the records that it refuses.

    Args:
        registry: where they are registered.
        peers: counts the peers in its routing table. Called from any thread.
        records: counts the records that it stores for others. Called from any thread.
        record_bytes: their size. Called from any thread.
    """

    def __init__(
        self,
        registry: Registry,
        peers: Callable[[], int],
        records: Callable[[], int],
        record_bytes: Callable[[], int],
    ) -> None:
        new = Instruments(registry, "swarm_dht")
        new.gauge("known_peers", "Peers in the routing table.").set_function(peers)
        new.gauge("records", "Records stored for the swarm, expired ones included.").set_function(records)
        new.gauge("record_bytes", "Size of these records.").set_function(record_bytes)
        self._refused = new.counter("refused_records", "Records that were not stored or not believed.", "reason")

    def record_refused(self, reason: str) -> None:
        """A record was refused, for one of the reasons of `swarm.transport.dht.records.RecordProblem`."""
        self._refused.labels(reason).inc()
