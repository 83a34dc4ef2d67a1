"""What all metrics share: the registry, histogram buckets, labels with few values, and the event loop's metrics.

Rules:
- A label's values come from a short list in this program, or from the operator's configuration. Nothing that peers or
  users send (peer ids, session ids, texts, names of unknown models) becomes a label.
- Times are in seconds, sizes in bytes; counters end in `_total`.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Collection
from typing import Any, TypeVar

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from swarm.common.version import VERSION
from swarm.errors import RemoteError

Registry = CollectorRegistry
"""Where metrics are registered. There is no global registry: several peers may run in one process."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # it would double the number of series for no use


def new_registry() -> Registry:
    """Make a registry with metrics of this process (memory, CPU time, open files) and its version."""
    registry = Registry()
    ProcessCollector(registry=registry)
    build = Info("swarm_build", "Version of this program and of Python.", registry=registry)
    build.info({"version": VERSION, "python": platform.python_version()})
    return registry


def encode_metrics(registry: Registry) -> tuple[bytes, str]:
    """Encode all metrics for Prometheus; returns the response's body and content type."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


M = TypeVar("M", bound=MetricWrapperBase)


class _Nothing:
    """Stands in for a metric where nothing collects metrics."""

    def labels(self, *values: str) -> _Nothing:
        return self

    def ignore(self, value: object = 1) -> None:
        """Count nothing."""

    inc = observe = set = info = ignore


_NOTHING: Any = _Nothing()


class Instruments:
    """Makes the metrics of one part of a program.

    Args:
        registry: where they are registered; None for metrics that count nothing.
        prefix: of their names.
    """

    def __init__(self, registry: Registry | None, prefix: str) -> None:
        self._registry, self._prefix = registry, prefix

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return self._made(Counter, name, meaning, labels)

    def gauge(self, name: str, meaning: str) -> Gauge:
        return self._made(Gauge, name, meaning, ())

    def info(self, name: str, meaning: str) -> Info:
        return self._made(Info, name, meaning, ())

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return self._made(Histogram, name, meaning, labels, buckets=buckets)

    def _made(self, kind: type[M], name: str, meaning: str, labels: tuple[str, ...], **options: Any) -> M:
        if self._registry is None:
            return _NOTHING  # type: ignore[no-any-return]
        return kind(f"{self._prefix}_{name}", meaning, labels, registry=self._registry, **options)


OTHER = "other"
"""Label for all values that are not in the list."""

STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a decode step on a small span to a long prompt."""

ANSWER_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
"""Times that users wait: for a first token, an answer, a failover."""

SEQUENCE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TOKEN_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


def label_or_other(value: str, known: Collection[str]) -> str:
    """The value if it is known, else `OTHER`."""
    return value if value in known else OTHER


def error_label(code: str) -> str:
    """The label for the code of a `RemoteError`."""
    return label_or_other(code, _ERROR_CODES)


def _codes(root: type[RemoteError]) -> frozenset[str]:
    return frozenset({root.code}).union(*map(_codes, root.__subclasses__()))


_ERROR_CODES = _codes(RemoteError) | {"late", "slow"}  # and why a session left a server that had not failed


PERIOD_S = 0.1
"""Time between two looks at the loop. Whatever blocks it for longer is always seen, and what is shorter as often as it
takes of all time."""


class EventLoopMetrics:
    """Metrics of the event loop in which `run` runs.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: Registry) -> None:
        new = Instruments(registry, "swarm_loop")
        late = "Time by which the event loop was late: it was blocked, or the machine is busy."
        self._lag = new.histogram("lag_seconds", late, STEP_BUCKETS_S)
        self._tasks = new.gauge("tasks", "Tasks in the event loop.")

    async def run(self) -> None:
        """Measure until the task is canceled."""
        loop = asyncio.get_running_loop()
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))  # counted when the metric is read
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._lag.observe(max(0.0, loop.time() - due))
