"""How the swarm's models did over the last hours: one point a minute and model, kept in memory and, if wanted, a file.

A minute's point is the worst of what was seen in it, so that no gap is lost between two good looks. The file is checked
when it is read; one of another kind is refused rather than overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.errors import UsageError
from swarm.monitor.swarm_view import ModelView, SwarmView

BUCKET = 60.0
"""Seconds of one point."""

KEPT = 24 * 3600.0
"""Seconds that points are kept."""

MAX_MODELS = 64
MAX_POINTS = int(KEPT / BUCKET) + 1
MAX_FILE = 32 << 20

FORMAT = "swarm-monitor-history-1"

Count = Annotated[int, msgspec.Meta(ge=0, le=10**6)]


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """One minute of one model.

    Attributes:
        time: Unix time at which the minute begins, in seconds.
        servers: that clients could use.
        throughput: tokens/s of the weakest block, 0 if one was missing.
        covered: blocks that were served.
    """

    time: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    servers: Count
    throughput: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    covered: Count


class ModelHistory(msgspec.Struct, frozen=True):
    """One model's points, the oldest first."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    points: Annotated[list[HistoryPoint], msgspec.Meta(max_length=MAX_POINTS)]

    @property
    def last(self) -> float:
        return self.points[-1].time if self.points else 0.0


class _HistoryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    models: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=512)], ModelHistory], msgspec.Meta(max_length=MAX_MODELS)
    ]


class SwarmHistory:
    """The last hours of all models.

    Attributes:
        tracks: by the model's name; replaced, never changed.
    """

    def __init__(self, tracks: dict[str, ModelHistory] | None = None) -> None:
        self.tracks = dict(tracks or {})

    def add(self, view: SwarmView) -> None:
        """Take one look in; looks come in the order of their times."""
        for model in view.models:
            known = self.tracks.get(model.name)
            points = known.points if known is not None else []
            self.tracks[model.name] = ModelHistory(model.blocks, _with(points, _point(model, view.time)))
        fresh = {name: track for name, track in self.tracks.items() if track.last > view.time - KEPT}
        latest = sorted(fresh, key=lambda name: (-fresh[name].last, name))[:MAX_MODELS]
        self.tracks = {name: fresh[name] for name in latest}

    def since(self, start: float, model: str | None = None) -> dict[str, ModelHistory]:
        """The points from Unix time `start` on, of one model or of all."""
        return {
            name: ModelHistory(track.blocks, [point for point in track.points if point.time >= start])
            for name, track in self.tracks.items()
            if model is None or name == model
        }

    @classmethod
    def read(cls, path: Path, now: float) -> SwarmHistory:
        """What the file holds and is not too old; nothing if there is no file. Raises `UsageError`."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE + 1)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise UsageError(f"the history {path} cannot be read: {error.strerror}") from None
        try:
            if len(data) > MAX_FILE:
                raise ValueError(f"it is larger than {MAX_FILE >> 20} MiB")
            content = msgspec.json.decode(data, type=_HistoryFile)
            if content.format != FORMAT:
                raise ValueError(f"its format is {content.format[:40]!r}")
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise UsageError(f"{path} is no history of a monitor: {error}. Name another file, or remove it") from None
        return cls({name: _checked(track, now) for name, track in content.models.items()})

    def write(self, path: Path) -> None:
        """Replace the file as a whole. Raises `OSError`."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_bytes(msgspec.json.encode(_HistoryFile(FORMAT, self.tracks)))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _point(model: ModelView, time: float) -> HistoryPoint:
    covered = sum(block.servers > 0 for block in model.coverage)
    return HistoryPoint(time - time % BUCKET, model.servers_online, model.throughput, covered)


def _with(points: list[HistoryPoint], new: HistoryPoint) -> list[HistoryPoint]:
    """The points and one more; a second one of the same minute is merged, one of the past is left out."""
    kept = [point for point in points[-MAX_POINTS:] if point.time > new.time - KEPT]
    if kept and kept[-1].time > new.time:
        return kept
    if kept and kept[-1].time == new.time:
        last = kept.pop()
        servers, covered = min(last.servers, new.servers), min(last.covered, new.covered)
        new = HistoryPoint(new.time, servers, min(last.throughput, new.throughput), covered)
    return [*kept, new]


def _checked(track: ModelHistory, now: float) -> ModelHistory:
    """In order, one point a minute, none of the future."""
    points: list[HistoryPoint] = []
    for point in sorted(track.points, key=lambda point: point.time):
        if now - KEPT < point.time <= now:
            aligned = msgspec.structs.replace(point, time=point.time - point.time % BUCKET)
            points = _with(points, aligned)
    return ModelHistory(track.blocks, points)
