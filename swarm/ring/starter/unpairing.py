"""Ends the pairing of a starter with its workers, so that another starter may have them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import uvloop

from swarm.errors import PairingRefused
from swarm.ring.joining import start_peer
from swarm.ring.locked_folder import LockedFolder, default_folder
from swarm.ring.pairing import WorkerLine
from swarm.ring.starter.handle import FOLDER
from swarm.ring.starter.ring_options import RingOptions
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.device import device_name

REACH_TIMEOUT_S = 15.0


def unpair(options: RingOptions) -> dict[WorkerLine, bool]:
    """End the pairing with the workers of a ring that does not run. Whether each was reached.

    Raises:
        PairingRefused: a worker has another starter; the subclass says so.
        FolderInUse: the ring runs.
    """
    folder = LockedFolder(options.folder or default_folder(FOLDER), "ring")
    try:
        return uvloop.run(_unpair(options, folder))
    finally:
        folder.close()


async def _unpair(options: RingOptions, folder: LockedFolder) -> dict[WorkerLine, bool]:
    peer = await start_peer(folder.path, options.host_maddrs, options.announce_maddrs, None, options.membership)
    try:
        for line in options.workers:
            peer.learn_addresses(line.peer_id, line.addresses)
        links = [
            WorkerLink(line, peer.peer_id, device_name(options.name), peer.open_worker_stream)
            for line in options.workers
        ]
        return dict(zip(options.workers, await asyncio.gather(*map(_unpair_one, links)), strict=True))
    finally:
        await peer.shutdown()


async def _unpair_one(link: WorkerLink) -> bool:
    there = asyncio.Event()
    link.on_change = lambda changed: there.set()
    talking = asyncio.create_task(link.run())
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_TIMEOUT_S):
                while not link.is_connected:
                    await there.wait()
                    there.clear()
                    if isinstance(link.error, PairingRefused):
                        raise link.error
        return await link.release(unpair=True)
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
