"""Shows how a ring starts: the weights are read, the workers answer, the plan, a bar for each worker's weights."""

from __future__ import annotations

from typing import Any

import click

from swarm.common import console
from swarm.common.units import format_bytes
from swarm.planning import plan_report
from swarm.planning.device_group import PipelinePlan
from swarm.planning.plan_report import advise
from swarm.ring.starter.life import RingWatcher
from swarm.ring.starter.ring_plan import RingGroup
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.device import describe


class RingProgress(RingWatcher):
    """Writes to standard error; bars until `close`, and lines of text also later."""

    def __init__(self) -> None:
        self._hashing: tuple[Any, int] | None = None
        self._bars: dict[str, tuple[Any, int]] = {}
        self._said: set[tuple[str, str]] = set()
        self._shows_bars = True

    def on_hashed(self, done_bytes: int, total_bytes: int) -> None:
        if self._hashing is None:
            self._hashing = _new_bar("Reading the weights", total_bytes), 0
        self._hashing = _moved(self._hashing, done_bytes)
        if done_bytes >= total_bytes:
            self._end_hashing()

    def on_plan(self, ring: RingGroup, plan: PipelinePlan) -> None:
        self._end_hashing()
        text = plan_report.format_plan(ring.group, plan, advise(ring.group, plan), "as measured from this machine")
        click.echo(f"\n{text}\n", err=True)

    def on_worker(self, link: WorkerLink) -> None:
        key, event = link.line.peer_id, link.event
        if link.is_connected and link.report is not None:
            self._say(key, "report", f"Worker {link.line}: {describe(link.report)}")
        if not self._shows_bars:
            return
        if event.state == "receiving" and event.total and link.assignment is not None:
            if key not in self._bars:
                said = f"{link.line.name}, blocks {link.assignment.start}:{link.assignment.end}"
                self._bars[key] = _new_bar(said, event.total), 0
            self._bars[key] = _moved(self._bars[key], event.done)
        elif key in self._bars:
            self._bars.pop(key)[0].__exit__(None, None, None)
        if event.state == "starting" and link.assignment is not None:
            size = format_bytes(link.assignment.total_bytes)
            self._say(key, "starting", event.message or f"Worker {link.line} has its weights ({size}), and loads them")
        elif event.state == "online" and link.assignment is not None:
            blocks = f"{link.assignment.start}:{link.assignment.end}"
            self._say(key, "online", f"Worker {link.line} serves blocks {blocks}")

    def on_notice(self, text: str) -> None:
        click.echo(text, err=True)

    def close(self) -> None:
        """The ring is complete, or has failed: no bars any more."""
        self._shows_bars = False
        self._end_hashing()
        for bar, _ in self._bars.values():
            bar.__exit__(None, None, None)
        self._bars.clear()

    def __enter__(self) -> RingProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _say(self, key: str, what: str, text: str) -> None:
        if (key, what) not in self._said:
            self._said.add((key, what))
            click.echo(text, err=True)

    def _end_hashing(self) -> None:
        if self._hashing is not None:
            self._hashing[0].__exit__(None, None, None)
            self._hashing = None


def _new_bar(title: str, total: int) -> Any:
    return console.progress_bar(title, total, "B").__enter__()


def _moved(bar: tuple[Any, int], done: int) -> tuple[Any, int]:
    shown, before = bar
    shown.update(done - before)
    return shown, done
