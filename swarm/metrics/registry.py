"""Registries of metrics, and their encoding in Prometheus' text format."""

from __future__ import annotations

import platform

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from swarm.common.version import VERSION

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
