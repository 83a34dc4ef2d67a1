"""Links between machines that are far apart, as a profile describes them: delay, jitter, rate, loss and stalls.

A profile is a JSON file (`benchmarks/wide_area/profiles/`). Its first machine is the client's, the others are servers'.
All machines are homes: what they send crosses an access network at both ends.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

PACKET_BYTES = 1400
MIN_TIMEOUT_S = 0.2
"""After which TCP sends again at the earliest what was lost at the end of a burst (Linux)."""


@dataclass(frozen=True)
class LinkShape:
    """One direction between two machines.

    Attributes:
        delay_s: one way.
        jitter: share of the delay by which it varies, up and down.
        rate: bytes per second.
        loss: share of the packets that are lost.
        stall_every_s, stall_s: on the average, and how long nothing passes then.
    """

    delay_s: float
    jitter: float = 0.0
    rate: float = math.inf
    loss: float = 0.0
    stall_every_s: float = math.inf
    stall_s: float = 0.0


class Link:
    """When what is sent over a link arrives. As TCP delivers: in order, and what was lost is sent again.

    Args:
        seed: of all that happens by chance.
    """

    def __init__(self, shape: LinkShape, seed: int) -> None:
        self._shape, self._random = shape, random.Random(seed)
        self._free_at = self._last = 0.0
        self._stall_at: float | None = None

    def due(self, now: float, size: int) -> float:
        """When so many bytes that are sent now have arrived."""
        shape, chance = self._shape, self._random
        start = self._behind_stalls(max(now, self._free_at))
        self._free_at = start + size / shape.rate
        delay = shape.delay_s * (1 + shape.jitter * chance.uniform(-1, 1))
        if chance.random() < 1 - (1 - shape.loss) ** math.ceil(max(1, size) / PACKET_BYTES):
            delay += max(MIN_TIMEOUT_S, 4 * shape.delay_s)
        self._last = max(self._last, self._free_at + delay)
        return self._last

    def _behind_stalls(self, time: float) -> float:
        shape = self._shape
        if math.isinf(shape.stall_every_s):
            return time
        if self._stall_at is None:
            self._stall_at = time + self._random.expovariate(1 / shape.stall_every_s)
        while self._stall_at <= time:
            time = max(time, self._stall_at + shape.stall_s)
            self._stall_at += shape.stall_s + self._random.expovariate(1 / shape.stall_every_s)
        return time


@dataclass(frozen=True)
class Profile:
    """Machines and the links between them.

    Attributes:
        name: for tables.
        machines: the city of each; the first is the client's.
    """

    name: str
    machines: tuple[str, ...]
    shapes: tuple[tuple[LinkShape, ...], ...]
    """From a machine to a machine."""

    @classmethod
    def read(cls, path: Path) -> Profile:
        stored = json.loads(path.read_text())
        machines, trips, stalls = stored["machines"], stored["round_trip_ms"], stored.get("stalls") or {}
        rate = stored.get("rate_mbit", math.inf) * 1e6 / 8

        def shape(here: str, there: str) -> LinkShape:
            trip_ms = trips.get(here, {}).get(there) or trips.get(there, {}).get(here) or stored["same_city_ms"]
            delay_s = (trip_ms / 2 + 2 * stored["access_ms"]) / 1000
            more = (stalls.get("every_s", math.inf), stalls.get("for_s", 0.0))
            return LinkShape(delay_s, stored.get("jitter", 0.0), rate, stored.get("loss", 0.0), *more)

        return cls(
            path.stem, tuple(machines), tuple(tuple(shape(one, other) for other in machines) for one in machines)
        )


def uniform(delay_s: float) -> Profile:
    """One machine, from which all others are equally far."""
    return Profile(f"{1000 * delay_s:g} ms", ("anywhere",), ((LinkShape(delay_s),),))
