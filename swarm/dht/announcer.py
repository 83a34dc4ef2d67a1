"""Keeps a server's announcement in the DHT: renewed every period and at each change; it expires when the server dies.

The server's model record is stored with it, for peers that do not know which models the swarm runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.dht import model_records
from swarm.dht.server_records import MAX_ADAPTERS, encode_announcement, model_key
from swarm.errors import ClockDiffers, DhtError
from swarm.transport.dht.hivemind_errors import raise_dht_errors
from swarm.transport.dht.records import MAX_LIFETIME_S
from swarm.transport.p2p import Peer

logger = logging.getLogger(__name__)

LIFETIME_PERIODS = 2.5
"""A record lives this many update periods, so that a live server does not vanish when one update is lost."""

MAX_CLOCK_SKEW_S = 60.0
"""Other peers' clocks may be this far behind and still accept the record with the longest lifetime."""


def adapter_names(sources: Iterable[str]) -> tuple[str, ...]:
    """Announced names of adapters given as folders or hub ids. Of a folder only the last part, as paths are private."""
    folders = ((source, os.path.expanduser(source)) for source in sources)
    names = (Path(folder).resolve().name if os.path.isdir(folder) else source for source, folder in folders)
    return tuple(name[:256] for name in dict.fromkeys(names))[:MAX_ADAPTERS]


class Announcer:
    """Stores this server's announcement in the DHT and renews it.

    Args:
        peer: this peer.
        model: the served model.
        describe: returns the current announcement; the announcer itself adds how the peer is reached.
        period: seconds between updates.
    """

    def __init__(self, peer: Peer, model: ModelInfo, describe: Callable[[], ServerInfo], period: float) -> None:
        self._peer = peer
        self._model = model
        self._describe = describe
        self._period = period
        self._task: asyncio.Task[None] | None = None
        self._is_due = asyncio.Event()

    def announce_soon(self) -> None:
        """Something has changed that others should know now."""
        self._is_due.set()

    def start(self) -> None:
        """Announce now, and then once every period."""
        self._task = asyncio.get_running_loop().create_task(self._renew())

    async def announce(self) -> bool:
        """Store the current announcement. False if no peer of the DHT accepted it. Raises `DhtError`."""
        with raise_dht_errors("announcing"):
            reach = self._peer.reach
            info = replace(self._describe(), relayed=reach.is_relayed, whereabouts=reach.whereabouts)
            now, lifetime = time.time(), self._period * LIFETIME_PERIODS
            announcement = encode_announcement(self._model.name, info)
            records = [(model_key(self._model.name, info.span.start), announcement, now + lifetime)]
            if info.state is not ServerState.OFFLINE:
                listed = min(max(model_records.MODEL_RECORD_LIFETIME_S, lifetime), MAX_LIFETIME_S - MAX_CLOCK_SKEW_S)
                model = model_records.encode_model(info.peer_id, self._model)
                records.append((model_records.list_key(info.peer_id), model, now + listed))
            return (await self._peer.dht.store(records))[0]

    async def stop(self) -> None:
        """Stop renewing. The last announcement stays until it expires."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _renew(self) -> None:
        while True:
            self._is_due.clear()
            try:
                if not await self.announce():
                    logger.warning("the announcement reached no peer of the DHT; trying again in %.0f s", self._period)
            except DhtError as error:
                is_unclear = not isinstance(error, ClockDiffers)
                logger.warning("%s; trying again in %.0f s", error, self._period, exc_info=is_unclear)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period):
                    await self._is_due.wait()
