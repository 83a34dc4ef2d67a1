"""Everything that is counted anywhere, as the code declares it."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.metrics.client import ClientMetrics
from swarm.metrics.dht import BootstrapMetrics
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import EventLoopMetrics, new_registry
from swarm.metrics.server import ServerObserver

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


@dataclass(frozen=True)
class Instrument:
    """Attributes:
    name: as it is documented.
    type: "counter", "gauge" or "histogram".
    labels: in their order; those of infos are not known before they are set.
    """

    name: str
    type: str
    labels: tuple[str, ...]

    @property
    def samples(self) -> tuple[str, ...]:
        """Names in queries."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.type])


def declared() -> list[Instrument]:
    """The instruments of all rooms."""
    registry = new_registry()
    EventLoopMetrics(registry)
    ServerObserver(registry)
    ClientMetrics(registry)
    GatewayMetrics(registry)
    BootstrapMetrics(registry, lambda: 0, lambda: 0, lambda: 0)
    found = []
    for collector in registry._collector_to_names:
        if not hasattr(collector, "_labelnames"):  # the collector of process metrics
            continue
        ending = {"counter": "_total", "info": "_info"}.get(collector._type, "")
        kind = "gauge" if collector._type == "info" else collector._type
        found.append(Instrument(collector._name + ending, kind, tuple(collector._labelnames)))
    return found


def process_metrics() -> set[str]:
    """Names of what is told of every process."""
    samples = (sample for family in new_registry().collect() for sample in family.samples)
    return {sample.name for sample in samples if sample.name.startswith("process_")}
