"""What a poller reads in tests: a swarm that the test describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.data_structures import ModelInfo, ServerInfo
from swarm.monitor.swarm_poller import PollResult
from swarm.monitor.swarm_view import AnnouncedModel


class DescribedSwarm:
    """A source whose looks find what was set last.

    Attributes:
        found: what the next look finds.
        error: what the next look raises instead, if not None.
        looks: how often it was looked.
        remembered: what the poller said it remembers.
        closed: whether the poller has left.
    """

    def __init__(self, *found: AnnouncedModel, trips: dict[str, float] | None = None) -> None:
        self.found = found
        self.error: Exception | None = None
        self.trips = trips or {}
        self.looks = 0
        self.remembered: Sequence[ModelInfo] = ()
        self.closed = False

    async def poll(self, remembered: Sequence[ModelInfo]) -> PollResult:
        self.looks += 1
        self.remembered = remembered
        if self.error is not None:
            raise self.error
        return PollResult(tuple(self.found))

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        return {peer: self.trips[peer] for peer in peer_ids if peer in self.trips}

    async def close(self) -> None:
        self.closed = True


def found(blocks: int, *servers: ServerInfo, name: str = "org/model") -> AnnouncedModel:
    """A model of `blocks` blocks and who serves it."""
    return AnnouncedModel(ModelInfo(name, blocks, "main"), tuple(servers))
