"""The process of `swarm worker`: a peer without a model, which does what its starter says until it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.common.console import MEMBERSHIP_VARIABLE, addresses_of_all_interfaces
from swarm.errors import SwarmError
from swarm.membership.invite import Invite
from swarm.protocol.messages import DeviceReport
from swarm.ring.joining import any_port, port_of, start_peer, told_addresses
from swarm.ring.pairing import WorkerLine
from swarm.ring.worker.device import Device, device_name, find_speed
from swarm.ring.worker.duty import WorkerDuty, WorkerWeights
from swarm.ring.worker.life import WorkerLife, WorkerStatus
from swarm.ring.worker.memory import WorkerMemory
from swarm.transport.p2p import Peer


@dataclass(frozen=True)
class WorkerOptions:
    """What the person who starts a worker says.

    Attributes:
        folder: of this worker.
        cache_dir: where weights are kept; None for inside the folder.
        name: shown to others; None for the machine's.
        host_maddrs: addresses to listen on; empty for all interfaces, at the port of last time.
        announce_maddrs: addresses at which others should dial it, if they differ.
        membership: an invite to a private swarm; None if the secret of the line decides who is let in.
        device: torch device, or "auto".
    """

    folder: Path
    cache_dir: Path | None = None
    name: str | None = None
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    membership: Invite | None = None
    device: str = "auto"


@dataclass(frozen=True)
class RunningWorker:
    """A worker that answers starters.

    Attributes:
        line: what its starter needs.
        device: what it is.
        life: what it does.
    """

    line: WorkerLine
    device: DeviceReport
    life: WorkerLife
    _peer: Peer

    async def lost(self) -> SwarmError:
        """Wait until it is cut off from the network; the reason."""
        await self._peer.wait_until_cut_off()
        return SwarmError("the libp2p daemon of this worker has ended, so no starter can reach it; start it again")


@asynccontextmanager
async def running_worker(
    options: WorkerOptions, on_change: Callable[[WorkerStatus], None] = lambda status: None
) -> AsyncIterator[RunningWorker]:
    """Run a worker; its folder has to be this process's own (`LockedFolder`).

    Args:
        on_change: called with each change of what it does.

    Raises:
        InvalidOption: the folder or the device cannot be used.
        AddressUnavailable, IdentityError, MembershipError: as `Peer.create`.
    """
    folder, memory = options.folder, WorkerMemory.read(options.folder)
    speed = await find_speed(folder, options.device)
    device = Device(device_name(options.name), speed, options.cache_dir or folder)
    async with AsyncExitStack() as stack:
        peer = await start_peer(folder, options.host_maddrs, options.announce_maddrs, memory.port, options.membership)
        stack.push_async_callback(peer.shutdown)
        addresses = told_addresses(await peer.visible_addresses(), options.announce_maddrs)
        port = port_of(await peer.visible_addresses())
        memory = memory.listening_at(port) if port is not None else memory
        await asyncio.to_thread(memory.write)

        weights = WorkerWeights(options.cache_dir or folder / "models", folder / "digests", peer)
        stack.callback(weights.close)
        environment = {"HF_HUB_OFFLINE": "1", MEMBERSHIP_VARIABLE: ""}
        if options.membership is not None:
            environment[MEMBERSHIP_VARIABLE] = options.membership.to_line()
        hosts = any_port(options.host_maddrs) or addresses_of_all_interfaces(0)
        duty = WorkerDuty(device, weights, hosts, environment)
        is_member = options.membership is not None
        life = WorkerLife(peer.peer_id, memory, is_member, duty, on_change)
        stack.push_async_callback(life.close)
        await peer.serve_weights(weights.serve)
        await peer.serve_starters(life.serve)
        secret = None if is_member else memory.secret
        yield RunningWorker(WorkerLine(peer.peer_id, device.name, addresses, secret), device.report(), life, peer)
