"""Metrics of a bootstrap peer, computed when they are read."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Gauge

from swarm.metrics.registry import Registry


class BootstrapMetrics:
    """Gauges of one bootstrap peer.

    Args:
        registry: where they are registered.
        peers: counts the peers in its routing table. Called from any thread.
        records: counts the records that it stores for others. Called from any thread.
    """

    def __init__(self, registry: Registry, peers: Callable[[], int], records: Callable[[], int]) -> None:
        known = Gauge("swarm_dht_known_peers", "Peers in the routing table.", registry=registry)
        known.set_function(peers)
        stored = Gauge("swarm_dht_records", "Records stored for the swarm, expired ones included.", registry=registry)
        stored.set_function(records)
