"""Starting the libp2p daemon, the process by which a peer talks to others."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.errors import RemoteError
from swarm.transport import daemon_streams
from swarm.transport.members.dht_lock import DhtLock
from swarm.transport.reach.circuit import ask_for_place

logger = logging.getLogger(__name__)

RESERVATIONS_A_PEER = 8
"""The daemon counts every reservation for an hour, also one whose connection has ended. A peer whose router is restless
needs several, and so many it grants to one IP address."""

CIRCUITS_PER_PEER = 128
"""Connections that a relay carries to one peer at a time: its clients, and the servers before it in their routes."""

RELAY_BUFFER_BYTES = 1 << 18
"""What a relayed connection may take of a relay's memory in each direction. The daemon's own default is 16 MiB."""

RELAY_TIME_LIMIT = "24h"
"""How long a relay carries one connection. After its end the client connects again and goes on where it was."""

RELAY_DATA_LIMIT_BYTES = 1 << 36
"""What a relay carries over one connection in each direction."""


MAX_RELAY_STARTS = 12
PROBE_TRIES, PROBE_TIMEOUT_S = 3, 5.0
"""On a busy machine a daemon that has just started may not answer at first."""


@dataclass(frozen=True)
class DaemonOptions:
    """How a daemon takes part in the network.

    Attributes:
        initial_peers, host_maddrs, announce_maddrs: see `P2PConfig`.
        identity_path: file of its key; None for a temporary one.
        relayed_peers: peers that may hold a place at its relay; 0 for no relay.
        is_local: it is reached from this machine only, or does not listen at all.
        is_client: it serves nothing, even if it listens.
        relay_limits: other limits of the relay than the usual ones, by the daemon's own names.
        asks_others: whether it asks the peers that it knows where another one is, if it cannot dial it as told.
    """

    initial_peers: Sequence[str] = ()
    host_maddrs: Sequence[str] = ()
    announce_maddrs: Sequence[str] = ()
    identity_path: Path | None = None
    check_identity: bool = False
    relayed_peers: int = 0
    is_local: bool = True
    is_client: bool = False
    relay_limits: Mapping[str, object] = field(default_factory=dict)
    asks_others: bool = True


async def start_daemon(options: DaemonOptions, folder: Path, lock: DhtLock | None = None) -> P2P:
    """Start a daemon with its sockets in `folder`. Raises `P2PDaemonError`; then nothing is left of it.

    About every second daemon that is started to relay takes no notice of the limits that it is given, and ends all
    connections after 128 KiB or two minutes. So it is asked for a place, and started again until its limits are right.
    """
    p2p = await _start_one(options, folder, lock)
    if not options.relayed_peers or options.is_local:
        return p2p
    try:
        with ExitStack() as stack:
            (probe_folder := folder / "probe").mkdir(mode=0o700)
            stack.callback(shutil.rmtree, probe_folder, ignore_errors=True)
            probe = await _start_one(DaemonOptions(asks_others=False), probe_folder, None)
            try:
                tries = 1
                while await _has_wrong_limits(p2p, options, probe) and tries < MAX_RELAY_STARTS:
                    await p2p.shutdown()
                    p2p = await _start_one(options, folder, lock)
                    tries += 1
            finally:
                await probe.shutdown()
    except BaseException:
        await p2p.shutdown()
        raise
    return p2p


async def _has_wrong_limits(p2p: P2P, options: DaemonOptions, probe: P2P) -> bool:
    """Whether the daemon relays with limits that it was not given. False if it cannot be asked."""
    for _ in range(PROBE_TRIES):
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, found = await p2p._client.identify()
                here = [one for one in map(_on_this_machine, options.host_maddrs) if not one.endswith("/tcp/0")]
                await daemon_streams.connect(probe, p2p.peer_id, [*map(Multiaddr, here), *found])
                return (await ask_for_place(probe, p2p.peer_id, PROBE_TIMEOUT_S)).is_too_small
        except (RemoteError, P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("the limits of this peer's relay are not known yet: %s", error or "it does not answer")
    logger.warning("The limits of this peer's relay are not known: its libp2p daemon did not answer")
    return False


def _on_this_machine(address: str) -> str:
    """An address to listen on, as it is dialed from the same machine."""
    return address.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")


async def _start_one(options: DaemonOptions, folder: Path, lock: DhtLock | None) -> P2P:
    """Start a daemon. Raises `P2PDaemonError`; then nothing is left of it.

    A daemon that listens is told that it can be reached. It would find that out by itself, but takes minutes, and
    until then it does not relay. Whether it can be reached is for `swarm.transport.reach` to find out.
    """
    # hivemind leaves its sockets behind when a daemon fails to start; our folder is removed with them.
    started: list[P2P] = []

    class Daemon(P2P):
        DHT_MODE_MAPPING: ClassVar[Any] = {**P2P.DHT_MODE_MAPPING, "none": {}}
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        def __init__(self) -> None:
            super().__init__()
            started.append(self)

        @staticmethod
        def _make_process_args(*args: object, **kwargs: object) -> list[str]:
            # In a session of its own: Ctrl-C in a terminal then reaches only this process, which ends the daemon.
            setsid = shutil.which("setsid")
            command: list[str] = P2P._make_process_args(*args, **kwargs, **_relay_limits(options))
            return [setsid, *command] if setsid is not None else command

        async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
            guarded = handler if lock is None else lock.guard(handler)
            await super().add_protobuf_handler(name, guarded, *args, **kwargs)

        async def call_protobuf_handler(self, peer_id: PeerID, name: str, request: Any, kind: Any) -> Any:
            call = super().call_protobuf_handler
            if lock is None:
                return await call(peer_id, name, request, kind)
            return await lock.call(lambda: call(peer_id, name, request, kind), request, self.peer_id, peer_id)

    listens = bool(options.host_maddrs)
    serves = listens and not options.is_client
    try:
        p2p = await Daemon.create(
            initial_peers=list(options.initial_peers) or None,
            host_maddrs=list(options.host_maddrs) or None,
            announce_maddrs=list(options.announce_maddrs) or None,
            identity_path=str(options.identity_path) if options.identity_path is not None else None,
            check_if_identity_free=options.check_identity,
            no_listen=not listens,
            dht_mode="none" if not options.asks_others else "server" if serves else "client",
            force_reachability="private" if options.is_client else "public" if not options.is_local else None,
            use_auto_relay=False,
            auto_nat=False,
            nat_port_map=not options.is_local,
        )
    except BaseException:
        for daemon in started:
            await daemon.shutdown()  # its process must end before the loop, which watches it
        raise
    mend_calls(p2p._client.control)
    return p2p


def _relay_limits(options: DaemonOptions) -> dict[str, object]:
    """Options of the daemon's relay. `-relayService=0`, its own switch, has no effect."""
    peers = options.relayed_peers
    usual: dict[str, object] = {
        "relayMaxReservations": peers * RESERVATIONS_A_PEER + 1 if peers else 0,  # one for the look at its limits
        "relayMaxCircuits": CIRCUITS_PER_PEER if peers else 0,
        "relayBufferSize": RELAY_BUFFER_BYTES,
        "relayTimeLimit": RELAY_TIME_LIMIT,
        "relayDataLimit": RELAY_DATA_LIMIT_BYTES,
    }
    return usual | dict(options.relay_limits)


# What hivemind keeps of the calls over its one connection to the daemon has two faults, both in `ControlClient`, in
# `_read_from_persistent_conn` and `_handle_persistent_request`. What follows mends them:
# - One task reads all answers and gives each to its call. If the call has been given up in this very moment (its future
#   is canceled, and its caller has not run yet), hivemind 1.1.12 raises `InvalidStateError` in that task, which ends:
#   every later call of this peer hangs, and it answers no more requests. A peer that answers just when its caller's
#   time is up can bring that about.
# - A request whose sender has gone before it was answered is never forgotten, with everything that it held.


class PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """The calls that wait for an answer. One that has ended is not among them, even if its caller does not know yet."""

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


class RunningRequests(dict[UUID, "asyncio.Task[None]"]):
    """The requests of others that are being answered. One that has ended is forgotten, however it did."""

    def __setitem__(self, call_id: UUID, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def mend_calls(control: Any) -> None:
    """Let hivemind's `ControlClient` keep its calls in these. For one that has no calls yet."""
    control._pending_calls = PendingCalls()
    control._handler_tasks = RunningRequests()
