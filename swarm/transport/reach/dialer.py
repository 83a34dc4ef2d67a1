"""Finding out whether a peer can be dialed at an address, by a libp2p daemon that knows nothing of that peer yet.

A peer's own daemon cannot tell: it uses a connection that is there, whoever has opened it. Nor can one that has dialed
the peer before: it would try the former address as well, or refuse to try so soon again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.errors import DialerBusy, PeerLost
from swarm.transport import daemon_streams
from swarm.transport.daemon import DaemonOptions, start_daemon
from swarm.transport.process_folder import ProcessFolder

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 4.0
"""How long one address may take to answer."""

ROUND_TRIPS, MAX_FAR_S = 5.0, 5.0
"""A new connection takes this many round trips for TCP, encryption and multiplexing. A dial is given that much longer,
at most by the second number of seconds, so that a slow link (a satellite, a busy uplink) does not look like a blocked
port."""

IDLE_S = 10.0
"""Daemons end when none of them has been used for so long."""

MAX_DAEMONS = 4
"""Daemons at a time. Whoever needs one more waits until one is free, and is then its only user."""


def dial_seconds(least_s: float, round_trip_s: float) -> float:
    """How long a peer so far away may take to answer."""
    return least_s + min(ROUND_TRIPS * round_trip_s, MAX_FAR_S)


@dataclass
class _Daemon:
    """A daemon that does not listen.

    Attributes:
        dialed: ids of the peers that it has dialed.
        users: dials that are under way.
    """

    p2p: P2P
    folder: ProcessFolder
    dialed: set[str] = field(default_factory=set)
    users: int = 0

    @property
    def lives(self) -> bool:
        child = self.p2p._child
        return child is not None and child.returncode is None

    async def end(self) -> None:
        await self.p2p.shutdown()
        self.folder.remove()


class Dialer:
    """Dials addresses as a stranger would. Its daemons run only while it is used."""

    def __init__(self) -> None:
        self._daemons: list[_Daemon] = []
        self._changed = asyncio.Condition()
        self._ending: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def dial(self, peer_id: str, address: str, timeout_s: float = DIAL_TIMEOUT_S) -> None:
        """Return when this very peer has answered at `address`, which does not name it.

        Raises `PeerLost`, and `DialerBusy` if no daemon was free for so long. The start of a daemon takes time of its
        own: on a busy machine it may take longer than any dial should.
        """
        try:
            target, there = PeerID.from_base58(peer_id), Multiaddr(address)
            daemon, left_s = await self._take(peer_id, timeout_s)
        except (P2PDaemonError, OSError, ValueError) as error:
            raise PeerLost(f"…{peer_id[-6:]} cannot be dialed at {address}: {error}") from None
        try:
            async with asyncio.timeout(left_s):
                await daemon_streams.connect(daemon.p2p, target, [there])
            with suppress(P2PDaemonError, OSError):
                await daemon.p2p._client.disconnect(target)
        except TimeoutError:
            raise PeerLost(f"…{peer_id[-6:]} does not answer at {address} within {timeout_s:g} s") from None
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise PeerLost(f"…{peer_id[-6:]} cannot be dialed at {address}: {error}") from None
        finally:
            daemon.users -= 1
            self._run(self._on_free())

    async def close(self) -> None:
        """End the daemons."""
        if self._ending is not None:
            self._ending.cancel()
        async with self._changed:
            daemons, self._daemons = self._daemons, []
            await asyncio.gather(*(daemon.end() for daemon in daemons))

    async def _take(self, peer_id: str, timeout_s: float) -> tuple[_Daemon, float]:
        """A daemon that has not dialed this peer yet, and what waiting for it has left of the time.

        Raises `DialerBusy` if none is free in time, and what starting one raises.
        """
        loop = asyncio.get_running_loop()
        left_s = timeout_s
        async with self._changed:
            while True:
                await self._end(*(daemon for daemon in self._daemons if not daemon.lives))
                daemon = next((daemon for daemon in self._daemons if peer_id not in daemon.dialed), None)
                if daemon is None and len(self._daemons) >= MAX_DAEMONS:
                    free = next((daemon for daemon in self._daemons if not daemon.users), None)
                    if free is None:
                        began = loop.time()
                        try:
                            async with asyncio.timeout(left_s):
                                await self._changed.wait()
                        except TimeoutError:
                            raise DialerBusy(
                                f"…{peer_id[-6:]} was not dialed, because {timeout_s:g} s were spent on others"
                            ) from None
                        left_s -= loop.time() - began
                        continue
                    await self._end(free)
                if daemon is None:
                    daemon = await self._start()
                daemon.dialed.add(peer_id)
                daemon.users += 1
                return daemon, left_s

    async def _start(self) -> _Daemon:
        folder = ProcessFolder()
        try:
            daemon = _Daemon(await start_daemon(DaemonOptions(asks_others=False), folder.path), folder)
        except BaseException:
            folder.remove()
            raise
        self._daemons.append(daemon)
        return daemon

    async def _end(self, *daemons: _Daemon) -> None:
        for daemon in daemons:
            self._daemons.remove(daemon)
            await daemon.end()

    async def _on_free(self) -> None:
        """A daemon is not used any more."""
        async with self._changed:
            self._changed.notify_all()
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_later(IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not any(daemon.users for daemon in self._daemons):
            self._run(self.close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
