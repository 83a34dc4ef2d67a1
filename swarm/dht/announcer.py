"""Keeps a server's announcement in the DHT: renewed every period, at once when something changes, gone when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from hivemind.dht.crypto import RSASignatureValidator

from swarm.data_structures import ServerInfo
from swarm.dht.records import encode, model_key
from swarm.transport.p2p import Peer

logger = logging.getLogger(__name__)

LIFETIME_PERIODS = 2.5
"""A record lives this many update periods, so that one lost update does not make a live server vanish."""


class Announcer:
    """Announces what `describe` returns.

    Args:
        peer: this peer.
        model: name of the served model.
        describe: the announcement as of now.
        period: seconds between updates.
    """

    def __init__(self, peer: Peer, model: str, describe: Callable[[], ServerInfo], period: float) -> None:
        self._peer = peer
        self._model = model
        self._describe = describe
        self._period = period
        self._subkey = RSASignatureValidator(peer.identity.private_key).local_public_key
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Announce now and then every period."""
        self._task = asyncio.get_running_loop().create_task(self._renew())

    async def announce(self) -> bool:
        """Store the announcement as of now. False if no peer of the DHT accepted it."""
        info = self._describe()
        stored = await self._peer.dht.store(
            key=model_key(self._model, info.span.start),
            subkey=self._subkey,
            value=encode(info),
            expiration_time=time.time() + self._period * LIFETIME_PERIODS,
        )
        return bool(stored)

    async def stop(self) -> None:
        """End the renewals. What was announced last stays until it expires."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _renew(self) -> None:
        while True:
            try:
                if not await self.announce():
                    logger.warning("the announcement reached no peer of the DHT; trying again in %.0f s", self._period)
            except Exception:
                logger.exception("announcing failed; trying again in %.0f s", self._period)
            await asyncio.sleep(self._period)
