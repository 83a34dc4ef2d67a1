"""Starting the libp2p daemon, the process by which a peer talks to others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from hivemind.p2p import P2P, PeerID

from swarm.transport.members.dht_lock import DhtLock


@dataclass(frozen=True)
class DaemonOptions:
    """How a daemon takes part in the network.

    Attributes:
        initial_peers, host_maddrs, announce_maddrs: see `P2PConfig`.
        identity_path: file of its key; None for a temporary one.
        is_local: it is reached from this machine only, or does not listen at all.
        is_client: it serves nothing, even if it listens.
        asks_others: whether it asks the peers that it knows where another one is, if it cannot dial it as told.
    """

    initial_peers: Sequence[str] = ()
    host_maddrs: Sequence[str] = ()
    announce_maddrs: Sequence[str] = ()
    identity_path: Path | None = None
    check_identity: bool = False
    is_local: bool = True
    is_client: bool = False
    asks_others: bool = True


async def start_daemon(options: DaemonOptions, folder: Path, lock: DhtLock | None = None) -> P2P:
    """Start a daemon with its sockets in `folder`. Raises `P2PDaemonError`; then nothing is left of it.

    A daemon that takes itself for reachable starts a relay at any time, in place of the one of `PeerStreams`. So each
    is told that it is not. Whether it can be reached is for `swarm.transport.reach` to find out.
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
            command: list[str] = P2P._make_process_args(*args, **kwargs)
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
            force_reachability="private",
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
