"""The last 24 hours of the swarm's models: one point per minute and model, in memory and optionally in a file.

A minute's point is the worst state that was seen in it, so that a gap between two good polls is not lost. The file is
validated when it is read. A file of another format is refused rather than overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.errors import UsageError
from swarm.monitor.swarm_view import ModelView, SwarmView

POINT_INTERVAL_S = 60.0
"""Time that one point covers."""

RETENTION_S = 24 * 3600.0
"""Time for which points are kept."""

MAX_MODELS = 64
MAX_POINTS = int(RETENTION_S / POINT_INTERVAL_S) + 1
MAX_FILE_BYTES = 32 << 20

FILE_FORMAT = "swarm-monitor-history-1"

Count = Annotated[int, msgspec.Meta(ge=0, le=10**6)]


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One minute of one model.

    Attributes:
        time: Unix time at which the minute begins, in seconds.
        servers: number of servers that clients could use.
        throughput: tokens/s of the weakest block, 0 if a block was missing.
        covered: number of blocks that were served.
    """

    time: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    servers: Count
    throughput: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    covered: Count


class ModelHistory(msgspec.Struct, frozen=True):
    """The points of one model, oldest first."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    points: Annotated[list[HistoryPoint], msgspec.Meta(max_length=MAX_POINTS)]

    @property
    def last(self) -> float:
        return self.points[-1].time if self.points else 0.0


class _HistoryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the history's file, as JSON."""

    format: str
    models: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=512)], ModelHistory], msgspec.Meta(max_length=MAX_MODELS)
    ]


class SwarmHistory:
    """The history of all models.

    Attributes:
        models: model name -> its history. Replaced at every change, never modified.
    """

    def __init__(self, models: dict[str, ModelHistory] | None = None) -> None:
        self.models = dict(models or {})

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

    @classmethod
    def read(cls, path: Path, now: float) -> SwarmHistory:
        """Read the file and drop points that are too old; an empty history if there is no file. Raises `UsageError`."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise UsageError(f"the history {path} cannot be read: {error.strerror}") from None
        try:
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
            content = msgspec.json.decode(data, type=_HistoryFile)
            if content.format != FILE_FORMAT:
                raise ValueError(f"its format is {content.format[:40]!r}")
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise UsageError(f"{path} is not a monitor's history: {error}. Give another file, or remove it") from None
        return cls({name: _validate(history, now) for name, history in content.models.items()})

    def write(self, path: Path) -> None:
        """Replace the file atomically. Raises `OSError`."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(msgspec.json.encode(_HistoryFile(FILE_FORMAT, self.models)))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


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


def _validate(history: ModelHistory, now: float) -> ModelHistory:
    """Sort the points, keep one per minute, and drop points of the future."""
    points: list[HistoryPoint] = []
    for point in sorted(history.points, key=lambda point: point.time):
        if now - RETENTION_S < point.time <= now:
            aligned = msgspec.structs.replace(point, time=point.time - point.time % POINT_INTERVAL_S)
            points = _append_point(points, aligned)
    return ModelHistory(history.blocks, points)
