"""What a bootstrap peer knows, told when somebody asks."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Gauge

from swarm.metrics.registry import Registry


class BootstrapMetrics:
    """Gauges of one bootstrap peer.

    Args:
        registry: where they are told.
        peers: counts the peers in its routing table. Called in any thread.
        records: counts the records that it stores for others. Called in any thread.
    """

    def __init__(self, registry: Registry, peers: Callable[[], int], records: Callable[[], int]) -> None:
        known = Gauge("swarm_dht_known_peers", "Peers in the routing table.", registry=registry)
        known.set_function(peers)
        stored = Gauge("swarm_dht_records", "Records stored for the swarm, expired ones included.", registry=registry)
        stored.set_function(records)
