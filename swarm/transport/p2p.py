"""A peer of the libp2p network: one daemon, one DHT node, streams to and from other peers.

Everything runs in the caller's asyncio loop; the only other process is the libp2p daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import weakref
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.validation import CompositeValidator, RecordValidatorBase
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm.errors import PeerLost, PeerUnreachable, ProtocolViolation
from swarm.protocol.messages import PROTOCOL_ID
from swarm.transport import addresses
from swarm.transport.identity import Identity, load_or_create
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.stream import FrameStream, Stream, StreamHandler

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 15.0
FLUSH_DELAY_S = 0.1
"""How long the daemon may take to send what was written to it, before it is shut down."""

DHT_SHUTDOWN_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class P2PConfig:
    """How a peer takes part in the network.

    Attributes:
        initial_peers: multiaddresses of known peers; empty starts a new swarm.
        host_maddrs: addresses to listen on; empty for a client, which only dials.
        announce_maddrs: addresses that other peers should dial, if they differ from `host_maddrs`.
        identity_path: file of the peer's key; None for a temporary identity.
    """

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None

    @property
    def is_client(self) -> bool:
        return not self.host_maddrs


class Peer:
    """A running peer of the libp2p network (`Network`). Start it with `Peer.create`, end it with `shutdown`."""

    def __init__(self, p2p: P2P, dht: DHTNode, identity: Identity, folder: ProcessFolder) -> None:
        self.peer_id = identity.peer_id
        self.identity = identity
        self.dht = dht
        self._p2p = p2p
        self._folder = folder
        self._serving: set[asyncio.Task[None]] = set()
        self._opened: weakref.WeakSet[FrameStream] = weakref.WeakSet()

    @classmethod
    async def create(cls, config: P2PConfig, validator: RecordValidatorBase) -> Peer:
        """Start the daemon and join the DHT.

        Args:
            validator: decides which DHT records this peer stores and believes, after their signature was checked.

        Raises:
            AddressUnavailable: an address to listen on is taken.
            PeerUnreachable: no initial peer answered, or this machine's clock is wrong.
            IdentityError: the identity file cannot be used.
        """
        addresses.parse_peers(config.initial_peers)
        addresses.validate_listen_addresses(config.host_maddrs)
        async with AsyncExitStack() as stack:
            folder = ProcessFolder()
            stack.callback(folder.remove)
            identity = load_or_create(config.identity_path or folder.path / "identity")
            p2p = await cls._start_daemon(config, identity, str(folder.path))
            stack.push_async_callback(p2p.shutdown)
            dht = await cls._join_dht(config, p2p, identity, validator)
            stack.pop_all()
            return cls(p2p, dht, identity, folder)

    @staticmethod
    async def _join_dht(config: P2PConfig, p2p: P2P, identity: Identity, validator: RecordValidatorBase) -> DHTNode:
        try:
            return await DHTNode.create(
                p2p=p2p,
                initial_peers=list(config.initial_peers) or None,
                client_mode=config.is_client,
                # The owner's key signs its records. Records without a valid signature are dropped.
                record_validator=CompositeValidator([RSASignatureValidator(identity.private_key), validator]),
                # A view of the swarm must be fresh, so nothing is cached besides what this node stores for others.
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
            )
        except RuntimeError as error:
            raise _unreachable(config) from error
        except ValidationError as error:
            raise PeerUnreachable(
                f"the initial peers answered, but rejected this peer: {error}. Check this machine's clock and "
                "firewall; swarm doctor --initial-peers ... tells more"
            ) from error

    @staticmethod
    async def _start_daemon(config: P2PConfig, identity: Identity, folder: str) -> P2P:
        local = config.is_client or addresses.is_loopback(config.host_maddrs)
        # hivemind leaves its sockets behind when a daemon fails to start; our folder is removed with them.
        started: list[P2P] = []

        class Daemon(P2P):
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

        try:
            return await Daemon.create(
                initial_peers=list(config.initial_peers) or None,
                host_maddrs=list(config.host_maddrs) or None,
                announce_maddrs=list(config.announce_maddrs) or None,
                identity_path=str(identity.path),
                check_if_identity_free=config.identity_path is not None,
                no_listen=config.is_client,
                dht_mode="client" if config.is_client else "server",
                # Behind a firewall, be reachable through other peers. Every reachable peer relays such traffic.
                use_auto_relay=not local,
                auto_nat=not local,
                nat_port_map=not local,
            )
        except P2PDaemonError as error:
            for daemon in started:
                await daemon.shutdown()  # its process must end before the loop, which watches it
            # A daemon says that it is ready only when it has reached an initial peer.
            if "bootstrap" in str(error) or (config.initial_peers and "failed to start in" in str(error)):
                raise _unreachable(config) from error
            raise PeerLost(f"the libp2p daemon did not start: {error}") from error

    async def visible_addresses(self) -> tuple[str, ...]:
        """Addresses that others can pass to `--initial-peers`, those with the widest reach first."""
        found = await self._p2p.get_visible_maddrs(latest=True)
        return addresses.sort_by_reach(str(address) for address in found)

    async def open_stream(self, peer_id: str) -> Stream:
        try:
            target = PeerID.from_base58(peer_id)
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes just when the stream opens.
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, reader, writer = await self._p2p.call_binary_stream_handler(target, PROTOCOL_ID)
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            raise PeerLost(f"peer …{peer_id[-6:]} cannot be reached: {error}") from None
        stream = FrameStream(peer_id, reader, writer)
        self._opened.add(stream)
        return stream

    async def serve(self, handler: StreamHandler) -> None:
        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = FrameStream(info.peer_id.to_base58(), reader, writer)
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            try:
                await handler(stream)
            except (PeerLost, ProtocolViolation) as error:
                logger.debug("stream of …%s ended: %s", stream.peer_id[-6:], error)
            except asyncio.CancelledError:  # asyncio would log it with a traceback
                logger.debug("stream of …%s ended: this peer is shutting down", stream.peer_id[-6:])
            finally:
                self._serving.discard(task)
                stream.close()

        await self._p2p.add_binary_stream_handler(PROTOCOL_ID, accept)

    async def wait_until_cut_off(self) -> None:
        """Wait until the daemon has ended: this peer is then cut off from the network."""
        await self._p2p._child.wait()

    async def shutdown(self) -> None:
        """Close all streams and end the daemon, after a short time to send what was written last."""
        await asyncio.sleep(FLUSH_DELAY_S)
        for stream in list(self._opened):
            stream.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        try:
            with suppress(Exception):  # whatever hivemind raises when the daemon has died
                await asyncio.wait_for(self.dht.shutdown(), DHT_SHUTDOWN_TIMEOUT_S)
        finally:
            await self._p2p.shutdown()
            self._folder.remove()


def _unreachable(config: P2PConfig) -> PeerUnreachable:
    peers = ", ".join(config.initial_peers)
    return PeerUnreachable(
        f"none of the initial peers answered: {peers}. Check that one of them is running and that its address, "
        "port and peer id are right"
    )


def quiet_hivemind() -> None:
    """Hide hivemind's own log lines unless HIVEMIND_LOGLEVEL is set. For entry points only."""
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        logging.getLogger("hivemind").setLevel(logging.ERROR)
