"""A peer of the libp2p network: one daemon, one DHT node, streams to and from other peers.

Everything runs in the caller's asyncio loop; the only other process is the libp2p daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hivemind.p2p import P2P, P2PDaemonError, PeerID

from swarm.data_structures import Whereabouts
from swarm.errors import (
    ClockDiffers,
    DhtError,
    MembershipError,
    NotAMember,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
)
from swarm.membership.certificates import Revocations
from swarm.membership.invite import Invite
from swarm.membership.membership import Membership
from swarm.protocol.messages import WEIGHTS_PROTOCOL_ID, WORKER_PROTOCOL_ID
from swarm.transport import addresses
from swarm.transport.daemon import DaemonOptions, start_daemon
from swarm.transport.dht.node import DhtNode
from swarm.transport.dht.records import RecordRules
from swarm.transport.identity import Identity, Signature, load_or_create
from swarm.transport.members.dht_lock import DhtLock
from swarm.transport.members.gate import Greetings, MemberGate, greet_all, require_welcome
from swarm.transport.peer_streams import PeerStreams
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.reach.address_book import AddressBook
from swarm.transport.reach.dial_back import DialBack
from swarm.transport.reach.heartbeat import round_trip
from swarm.transport.reach.reachability import Reachability, ReachOptions
from swarm.transport.reach.relay_service import CIRCUIT_BYTES, RelayService
from swarm.transport.stream import Stream, StreamHandler

logger = logging.getLogger(__name__)

FLUSH_DELAY_S = 0.1
"""How long the daemon may take to send what was written to it, before it is shut down."""

DHT_SHUTDOWN_TIMEOUT_S = 1.0

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)

RELAYED_PEERS = 64
"""How many peers behind routers a peer relays for, unless it is told otherwise."""


@dataclass(frozen=True)
class P2PConfig:
    """How a peer takes part in the network.

    Attributes:
        initial_peers: multiaddresses of known peers; empty starts a new swarm.
        host_maddrs: addresses to listen on; empty for a client, which only dials.
        announce_maddrs: addresses that other peers should dial, if they differ from `host_maddrs`.
        identity_path: file of the peer's key; None for a temporary identity. The newest list of revocations is kept
            beside it.
        membership: this peer's invite to a private swarm; None for an open swarm.
        relay: how many peers behind routers this one relays for, if others can reach it, or whether it does.
        circuit_bytes: how much it carries over one connection in each direction; then the connection ends.
    """

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None
    membership: Invite | None = None
    relay: bool | int = True
    circuit_bytes: int = CIRCUIT_BYTES

    @property
    def is_client(self) -> bool:
        return not self.host_maddrs

    @property
    def is_local(self) -> bool:
        """Whether this peer is reached from its own machine only, or not at all."""
        return self.is_client or addresses.is_loopback(self.host_maddrs)

    @property
    def dials_from_one_port(self) -> bool:
        """Whether this is a client that may use servers behind routers: its daemon listens, so that all its connections
        come from one port, which hole punching needs."""
        return self.is_client and not addresses.is_loopback(self.initial_peers)

    @property
    def relayed_peers(self) -> int:
        """How many peers behind routers may hold a place at this one."""
        if self.is_client:
            return 0
        return int(self.relay) if not isinstance(self.relay, bool) else RELAYED_PEERS if self.relay else 0


_peers: weakref.WeakSet[Peer] = weakref.WeakSet()


class Peer:
    """A running peer of the libp2p network (`Network`). Start it with `Peer.create`, end it with `shutdown`."""

    def __init__(
        self,
        p2p: P2P,
        dht: DhtNode,
        identity: Identity,
        folder: ProcessFolder,
        streams: PeerStreams,
        gate: MemberGate | None,
        reach: Reachability,
        book: AddressBook,
        initial_peers: tuple[str, ...] = (),
    ) -> None:
        self.peer_id = identity.peer_id
        self.identity = identity
        self.dht = dht
        self.reach = reach
        self._p2p = p2p
        self._folder = folder
        _peers.add(self)
        self._streams = streams
        self._gate = gate
        self._book = book
        self._initial_peers = initial_peers
        self._greeting: asyncio.Task[None] | None = None
        if gate is not None:
            greetings = Greetings(gate, streams.greet, self._neighbors)
            self._greeting = asyncio.get_running_loop().create_task(greetings.run())
        reach.start()

    @classmethod
    async def create(cls, config: P2PConfig, rules: RecordRules) -> Peer:
        """Start the daemon and join the DHT, whose records are stored and believed by these rules.

        Raises:
            AddressUnavailable: an address to listen on is taken.
            PeerUnreachable: no initial peer answered, or this machine's clock is wrong.
            IdentityError: the identity file cannot be used.
            MembershipError: the initial peers do not take this peer as a member, or are of an open swarm; or the swarm
                is private and this peer has no invite.
        """
        addresses.parse_peers(config.initial_peers)
        addresses.validate_listen_addresses(config.host_maddrs)
        async with AsyncExitStack() as stack:
            folder = ProcessFolder()
            stack.callback(folder.remove)
            identity = load_or_create(config.identity_path or folder.path / "identity")
            gate = _make_gate(config, identity)
            p2p = await cls._start_daemon(config, identity, folder.path, gate)
            stack.push_async_callback(p2p.shutdown)
            book = AddressBook()
            streams = PeerStreams(p2p, gate, book)
            may_hold = gate.has_admitted if gate is not None else lambda peer_id: True
            await streams.relay(RelayService(p2p, config.relayed_peers, config.circuit_bytes, may_hold))
            if not config.is_client:
                await streams.listen()
            if gate is not None:
                require_welcome(await greet_all(_initial_peer_ids(config), streams.greet))
            try:
                dht = await cls._join_dht(config, p2p, identity, rules, book)
            except PeerUnreachable:
                if gate is None:
                    await streams.require_open_swarm(_initial_peer_ids(config))
                raise
            reach = _make_reach(config, p2p, dht, streams, book)
            streams.on_unreachable = reach.notices.tell
            streams.outside_known = reach.known
            if not config.is_local or config.dials_from_one_port:
                streams.puncher = reach.puncher
            if not config.is_client:
                dial_back = DialBack(reach.dialer, partial(round_trip, p2p), reach.notices.receive, reach.puncher)
                await streams.answer_dial_back(dial_back.serve)
            stack.pop_all()
            if config.membership is not None and not config.is_client:
                logger.info("Private swarm: this peer is a member as %s", config.membership.certificate.describe())
            return cls(p2p, dht, identity, folder, streams, gate, reach, book, config.initial_peers)

    @staticmethod
    async def _join_dht(
        config: P2PConfig, p2p: P2P, identity: Identity, rules: RecordRules, book: AddressBook
    ) -> DhtNode:
        initial_peers = map(PeerID.from_base58, _initial_peer_ids(config))
        # Until it is known whether others can reach this peer, none is told to ask it.
        is_client = config.is_client or (not config.is_local and bool(config.initial_peers))
        node = DhtNode(p2p, identity, rules, tuple(dict.fromkeys(initial_peers)), is_client, book)
        try:
            await node.join()
        except ClockDiffers as error:
            raise PeerUnreachable(
                f"the initial peers answered, but rejected this peer: {error}. Check this machine's clock and "
                "firewall; swarm doctor --initial-peers ... tells more"
            ) from error
        except DhtError as error:
            raise _unreachable(config) from error
        return node

    @staticmethod
    async def _start_daemon(config: P2PConfig, identity: Identity, folder: Path, gate: MemberGate | None) -> P2P:
        lock = DhtLock(gate.membership) if gate is not None else None
        options = DaemonOptions(
            initial_peers=config.initial_peers,
            host_maddrs=config.host_maddrs if not config.dials_from_one_port else ANY_PORT,
            announce_maddrs=config.announce_maddrs,
            identity_path=identity.path,
            check_identity=config.identity_path is not None,
            is_local=config.is_local,
            is_client=config.is_client,
        )
        try:
            return await start_daemon(options, folder, lock)
        except P2PDaemonError as error:
            # A daemon says that it is ready only when it has reached an initial peer.
            if "bootstrap" in str(error) or (config.initial_peers and "failed to start in" in str(error)):
                raise _unreachable(config) from error
            raise PeerLost(f"the libp2p daemon did not start: {error}") from error

    async def visible_addresses(self) -> tuple[str, ...]:
        """Addresses that others can pass to `--initial-peers`, those with the widest reach first."""
        found = await self._p2p.get_visible_maddrs(latest=True)
        return addresses.sort_by_reach(str(address) for address in found)

    async def join_addresses(self) -> tuple[str, ...]:
        """Addresses by which others can join the swarm, those with the widest reach first.

        Those of the initial peers come first where this peer has none that others could dial.
        """
        visible = await self.visible_addresses()
        if self.reach.is_relayed:
            return tuple(dict.fromkeys((*self._initial_peers, *visible)))
        own = (f"{address}/p2p/{self.peer_id}" for address in self.reach.direct_addresses)
        return tuple(dict.fromkeys((*own, *visible, *self._initial_peers)))

    async def open_stream(self, peer_id: str) -> Stream:
        return await _usable(peer_id, self._streams.open(peer_id))

    async def open_weights_stream(self, peer_id: str) -> Stream:
        """A stream on which a peer is asked for weights. Raises `PeerLost`."""
        return await _usable(peer_id, self._streams.open_protocol(peer_id, WEIGHTS_PROTOCOL_ID))

    async def serve(self, handler: StreamHandler) -> None:
        await self._streams.serve(handler)

    async def open_worker_stream(self, peer_id: str) -> Stream:
        """A stream to a worker, as its starter. Raises `PeerLost`, or `NotAMember` in a private swarm."""
        return await self._streams.open_protocol(peer_id, WORKER_PROTOCOL_ID)

    async def serve_starters(self, handler: StreamHandler) -> None:
        """Call `handler` for every stream that a starter opens to this worker."""
        await self._streams.serve_protocol(WORKER_PROTOCOL_ID, handler)

    def learn_addresses(self, peer_id: str, known: Sequence[str]) -> None:
        """Dial a peer at these multiaddresses from now on, which do not name the peer itself."""
        self._book.learn(peer_id, Whereabouts(tuple(known)))

    async def serve_weights(self, handler: StreamHandler) -> None:
        """Call `handler` for every stream on which a peer asks for weights."""
        await self._streams.serve_protocol(WEIGHTS_PROTOCOL_ID, handler)

    def knows(self, peer_id: str) -> bool:
        return self.dht.knows(peer_id)

    def sign(self, data: bytes) -> Signature:
        return self.identity.sign(data)

    @property
    def revocations(self) -> Revocations:
        """The newest list of revocations that this peer of a private swarm has seen."""
        assert self._gate is not None, "only in a private swarm"
        return self._gate.membership.revocations

    async def hand_out_revocations(self, newest: bytes) -> int:
        """Give the peers that this one knows a list of revocations. Returns how many have it now.

        Raises `ProtocolViolation` or `UnknownAuthority` if it is not a list of this swarm's authority.
        """
        assert self._gate is not None, "only in a private swarm"
        self._gate.membership.learn(newest)
        results = await greet_all(self._neighbors(), self._streams.greet)
        return sum(error is None for error in results.values())

    def _neighbors(self) -> list[str]:
        """Ids of the peers in this peer's DHT routing table."""
        return self.dht.known_peers

    async def wait_until_cut_off(self) -> None:
        """Wait until the daemon has ended: this peer is then cut off from the network."""
        await self._p2p._child.wait()

    async def shutdown(self) -> None:
        """Close all streams and end the daemon, after a short time to send what was written last."""
        await asyncio.sleep(FLUSH_DELAY_S)
        await self.reach.close()
        tasks = self._streams.close()
        if self._greeting is not None:
            self._greeting.cancel()
            tasks.append(self._greeting)
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            with suppress(Exception):  # whatever hivemind raises when the daemon has died
                await asyncio.wait_for(self.dht.shutdown(), DHT_SHUTDOWN_TIMEOUT_S)
        finally:
            await self._p2p.shutdown()
            self._folder.remove()


async def _usable(peer_id: str, opening: Awaitable[Stream]) -> Stream:
    """The stream. Raises `PeerLost` also where the two peers cannot talk to each other, whoever is to blame."""
    try:
        return await opening
    except (NotAMember, ProtocolViolation) as error:
        raise PeerLost(f"peer …{peer_id[-6:]} cannot be used: {error}") from error


def _make_reach(config: P2PConfig, p2p: P2P, dht: DhtNode, streams: PeerStreams, book: AddressBook) -> Reachability:
    is_local = not config.is_client and config.is_local
    known_local = addresses.is_loopback(config.initial_peers) if config.is_client else is_local
    options = ReachOptions(config.initial_peers, config.announce_maddrs, known_local, not config.is_client)
    return Reachability(p2p, options, streams.open_dial_back, lambda: dht.known_peers, dht.serve_others, book)


def _make_gate(config: P2PConfig, identity: Identity) -> MemberGate | None:
    """The gate of a private swarm's peer. Raises `MembershipError` if its own invite does not hold."""
    if config.membership is None:
        return None
    path = config.identity_path
    membership = Membership(config.membership, path.with_name(f"{path.name}.revocations") if path is not None else None)
    try:
        membership.require_own()
    except NotAMember as error:
        raise MembershipError(str(error)) from None
    return MemberGate(membership, identity.peer_id)


def _initial_peer_ids(config: P2PConfig) -> list[str]:
    return [address.rpartition("/p2p/")[2] for address in config.initial_peers]


def _unreachable(config: P2PConfig) -> PeerUnreachable:
    peers = ", ".join(config.initial_peers)
    return PeerUnreachable(
        f"none of the initial peers answered: {peers}. Check that one of them is running and that its address, "
        "port and peer id are right"
    )


def _leave_to_parent() -> None:
    """In a forked process: what goes out of use here must not end the daemons of the parent, nor remove its folders."""
    for peer in _peers:
        peer._p2p._terminate = lambda: None
        peer._folder.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


def quiet_hivemind() -> None:
    """Hide hivemind's own log lines unless HIVEMIND_LOGLEVEL is set. For entry points only."""
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        logging.getLogger("hivemind").setLevel(logging.ERROR)
