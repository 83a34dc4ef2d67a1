"""What is counted in this process, and how it is told in Prometheus' text format."""

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
"""Where instruments are registered. There is no global one: several peers may live in one process."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # a further series a series, which nobody asks for


def new_registry() -> Registry:
    """A registry that tells already what this process takes (memory, processor time, files) and its version."""
    registry = Registry()
    ProcessCollector(registry=registry)
    build = Info("swarm_build", "Version of this program and of Python.", registry=registry)
    build.info({"version": VERSION, "python": platform.python_version()})
    return registry


def exposition(registry: Registry) -> tuple[bytes, str]:
    """The body of an answer to Prometheus, and its content type."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
