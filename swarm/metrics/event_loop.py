"""Metrics of a process's event loop: whether something blocks it, and how many tasks live in it."""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge, Histogram

from swarm.metrics.instruments import STEP_BUCKETS_S
from swarm.metrics.registry import Registry

PERIOD_S = 0.1
"""Time between two looks at the loop. Whatever blocks it for longer is always seen, and what is shorter as often as it
takes of all time."""


class EventLoopMetrics:
    """Metrics of the event loop in which `run` runs.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: Registry) -> None:
        self._lag = Histogram(
            "swarm_loop_lag_seconds",
            "Time by which the event loop was late: it was blocked, or the machine is busy.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._tasks = Gauge("swarm_loop_tasks", "Tasks in the event loop.", registry=registry)

    async def run(self) -> None:
        """Measure until the task is canceled."""
        loop = asyncio.get_running_loop()
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))  # counted when somebody asks
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._lag.observe(max(0.0, loop.time() - due))
