"""The last 24 hours of the swarm's models: one point per minute and model, in memory.

A minute's point is the worst state that was seen in it, so that a gap between two good polls is not lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.monitor.swarm_view import ModelView, SwarmView

POINT_INTERVAL_S = 60.0
"""Time that one point covers."""

RETENTION_S = 24 * 3600.0
"""Time for which points are kept."""

MAX_MODELS = 64
MAX_POINTS = int(RETENTION_S / POINT_INTERVAL_S) + 1


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One minute of one model.

    Attributes:
        time: Unix time at which the minute begins, in seconds.
        servers: number of servers that clients could use.
        throughput: tokens/s of the weakest block, 0 if a block was missing.
        covered: number of blocks that were served.
    """

    time: float
    servers: int
    throughput: float
    covered: int


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """The points of one model, oldest first."""

    blocks: int
    points: list[HistoryPoint]

    @property
    def last(self) -> float:
        return self.points[-1].time if self.points else 0.0


class SwarmHistory:
    """The history of all models.

    Attributes:
        models: model name -> its history. Replaced at every change, never modified.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelHistory] = {}

    def record(self, view: SwarmView) -> None:
        """Add a view. Views must come in the order of their times."""
        for model in view.models:
            known = self.models.get(model.name)
            points = known.points if known is not None else []
            self.models[model.name] = ModelHistory(
                model.blocks, _append_point(points, _history_point(model, view.time))
            )
        fresh = {name: history for name, history in self.models.items() if history.last > view.time - RETENTION_S}
        latest = sorted(fresh, key=lambda name: (-fresh[name].last, name))[:MAX_MODELS]
        self.models = {name: fresh[name] for name in latest}

    def points_since(self, start: float, model: str | None = None) -> dict[str, ModelHistory]:
        """The points from Unix time `start` on, of one model or of all."""
        return {
            name: ModelHistory(history.blocks, [point for point in history.points if point.time >= start])
            for name, history in self.models.items()
            if model is None or name == model
        }


def _history_point(model: ModelView, time: float) -> HistoryPoint:
    covered = sum(block.servers > 0 for block in model.coverage)
    return HistoryPoint(time - time % POINT_INTERVAL_S, model.servers_online, model.throughput, covered)


def _append_point(points: list[HistoryPoint], new: HistoryPoint) -> list[HistoryPoint]:
    """Append a point. A second point of the same minute is merged; a point of the past is dropped."""
    kept = [point for point in points[-MAX_POINTS:] if point.time > new.time - RETENTION_S]
    if kept and kept[-1].time > new.time:
        return kept
    if kept and kept[-1].time == new.time:
        last = kept.pop()
        servers, covered = min(last.servers, new.servers), min(last.covered, new.covered)
        new = HistoryPoint(new.time, servers, min(last.throughput, new.throughput), covered)
    return [*kept, new]
