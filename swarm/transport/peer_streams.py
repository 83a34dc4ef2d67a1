"""The streams of a peer: those that it opens, and those that others open and that a handler serves.

In a private swarm, each stream passes a `MemberGate` before anything else is done with it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, suppress

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from multiaddr import Multiaddr

from swarm.errors import MembershipError, NotAMember, PeerLost, ProtocolViolation, SwarmError, sanitize_text
from swarm.protocol import messages
from swarm.protocol.messages import DIAL_BACK_PROTOCOL_ID, MEMBERS_PROTOCOL_ID, PROTOCOL_ID, WORKER_PROTOCOL_ID
from swarm.transport import daemon_streams
from swarm.transport.members.gate import MemberGate
from swarm.transport.reach.address_book import AddressBook
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID
from swarm.transport.reach.hole_punching import HolePuncher
from swarm.transport.reach.relay_service import RelayService
from swarm.transport.stream import FrameStream, Stream, StreamHandler

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 15.0
LAN_DIAL_TIMEOUT_S = 1.0
"""How long a peer in the same network is dialed there only: a relay may be quicker, and its connection stays."""

OUTSIDE_TIMEOUT_S = 1.0
"""How long to wait for this peer's outer address, which tells which peers share its network."""

ANSWER_TIMEOUT_S = 5.0
"""How long a peer that did not let this one join may take to say that its swarm is private."""

START_TIME_S = 1.0
"""How long a peer that has just started its daemon may take to serve the members' protocol."""

AddressedHandler = Callable[[FrameStream, str], Awaitable[None]]
"""Serves a stream, given the multiaddress from which it comes."""

RawHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a stream that carries other messages than ours."""

NOT_SPOKEN = "protocols not supported"
"""What libp2p says of a peer that is there, but does not serve a protocol."""


class PeerStreams:
    """Opens streams through the libp2p daemon, and serves those of others.

    Args:
        p2p: the daemon.
        gate: None in an open swarm.
        book: where other peers can be dialed.

    Attributes:
        on_unreachable: called with the id of a peer that could not be dialed, or did not answer.
        outside_known: set once this peer has learned its outer address, or that no peer reports one.
        puncher: connects to peers that cannot be dialed; None if this peer reaches others through relays only.
    """

    def __init__(self, p2p: P2P, gate: MemberGate | None, book: AddressBook) -> None:
        self._p2p = p2p
        self._gate = gate
        self._book = book
        self._handler: StreamHandler | None = None
        self.on_unreachable: Callable[[str], None] = lambda peer_id: None
        self.outside_known = asyncio.Event()
        self.puncher: HolePuncher | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._opened: weakref.WeakSet[FrameStream] = weakref.WeakSet()

    async def open(self, peer_id: str) -> FrameStream:
        """A stream to another peer, which in a private swarm has proven that it is a member.

        Raises `PeerLost` if it cannot be reached. In a private swarm also `NotAMember`, if it refused this peer or did
        not prove its own membership, and `ProtocolViolation`.
        """
        if self._gate is None:
            return await self._enter(await self._dial(peer_id, PROTOCOL_ID))
        return await self._enter(await self._dial_member(peer_id))

    async def greet(self, peer_id: str) -> None:
        """Open a stream and close it, so that both peers have each other's newest revocations. Raises as `open`."""
        (await self.open(peer_id)).close()

    async def require_open_swarm(self, peer_ids: Iterable[str]) -> None:
        """Raise `MembershipError` if one of these peers belongs to a private swarm. Other troubles are ignored."""

        async def ask(peer_id: str) -> None:
            with suppress(PeerLost, ProtocolViolation, TimeoutError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    with closing(await self.open(peer_id)) as stream:
                        reply = messages.decode_server((await stream.receive(0)).header)
                    if isinstance(reply, messages.Refusal) and reply.code == NotAMember.code:
                        raise MembershipError(sanitize_text(reply.message))

        await asyncio.gather(*map(ask, peer_ids))

    async def _dial_member(self, peer_id: str) -> FrameStream:
        try:
            return await self._dial(peer_id, MEMBERS_PROTOCOL_ID)
        except PeerLost as error:
            if NOT_SPOKEN not in str(error):
                raise
        await asyncio.sleep(START_TIME_S)
        try:
            return await self._dial(peer_id, MEMBERS_PROTOCOL_ID)
        except PeerLost as error:
            if NOT_SPOKEN not in str(error):
                raise
            raise NotAMember(
                f"peer …{peer_id[-6:]} is not a member of a private swarm, or runs another version: leave the "
                "membership out to join an open swarm"
            ) from None

    async def _dial(self, peer_id: str, protocol: str) -> FrameStream:
        try:
            target = PeerID.from_base58(peer_id)
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes just when the stream opens.
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._connect(target, protocol)
                reader, writer = await daemon_streams.open_stream(self._p2p, target, protocol)
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            if protocol not in (DIAL_BACK_PROTOCOL_ID, WORKER_PROTOCOL_ID) and NOT_SPOKEN not in str(error):
                self.on_unreachable(peer_id)
            raise PeerLost(f"peer …{peer_id[-6:]} cannot be reached: {error}") from None
        return FrameStream(peer_id, reader, writer)

    async def _connect(self, target: PeerID, protocol: str) -> None:
        """Connect to a peer where it says that it is, if it does. Raises as `daemon_streams.connect`."""
        peer_id = target.to_base58()
        if self._book.may_be_near(peer_id) and protocol != DIAL_BACK_PROTOCOL_ID:  # by which the outside is learned
            with suppress(TimeoutError):
                async with asyncio.timeout(OUTSIDE_TIMEOUT_S):
                    await self.outside_known.wait()
        near = list(map(Multiaddr, self._book.lan_addresses_of(peer_id)))
        if near:
            with suppress(P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(LAN_DIAL_TIMEOUT_S):
                    return await daemon_streams.connect(self._p2p, target, near)
        announced = self._book.addresses_of(peer_id)
        if self.puncher is not None and protocol != DIAL_BACK_PROTOCOL_ID and self._book.is_hidden(peer_id):
            await self.puncher.connect(peer_id, announced, self._book.outer_host_of(peer_id))
        elif announced:
            await daemon_streams.connect(self._p2p, target, list(map(Multiaddr, announced)))

    async def open_protocol(self, peer_id: str, protocol: str) -> FrameStream:
        """A stream of another protocol than that of sessions. Raises as `open`."""
        return await self._enter(await self._dial(peer_id, protocol))

    async def open_dial_back(self, peer_id: str) -> FrameStream:
        """A stream on which a peer can be asked to dial this one back. Raises as `open`."""
        return await self.open_protocol(peer_id, DIAL_BACK_PROTOCOL_ID)

    async def _enter(self, stream: FrameStream) -> FrameStream:
        """In a private swarm, have both sides prove their membership on a new stream. Raises as `open`."""
        if self._gate is not None:
            try:
                await self._gate.enter(stream)
            except BaseException:
                stream.abort()
                raise
        self._opened.add(stream)
        return stream

    async def answer_dial_back(self, answer: AddressedHandler) -> None:
        """Call `answer` for every stream on which a peer asks to be dialed back, with the address it comes from."""
        await self._serve_members(DIAL_BACK_PROTOCOL_ID, answer)

    async def serve_protocol(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for every stream of this protocol that another peer opens, and that may pass."""
        await self._serve_members(protocol, lambda stream, address: handler(stream))

    async def listen(self) -> None:
        """Be there for members from now on, and refuse strangers; what members ask for waits for `serve`.

        Does nothing in an open swarm, where a peer without a handler has nothing to say.
        """
        gate = self._gate
        if gate is not None:
            await self.serve_protocol(MEMBERS_PROTOCOL_ID, self._serve)
            await self._answer(PROTOCOL_ID, lambda stream, address: gate.refuse_stranger(stream))

    async def relay(self, relay: RelayService) -> None:
        """Have others be relayed by this, and not by the daemon, which no option keeps from relaying."""
        await self._accept(RELAY_PROTOCOL_ID, relay.serve)

    async def serve(self, handler: StreamHandler) -> None:
        """Call `handler` for every stream that another peer opens, and that may pass."""
        self._handler = handler
        if self._gate is None:
            await self.serve_protocol(PROTOCOL_ID, self._serve)

    def close(self) -> list[asyncio.Task[None]]:
        """Close all streams. Returns the tasks of the handlers, which are cancelled."""
        for stream in list(self._opened):
            stream.close()
        for task in self._serving:
            task.cancel()
        return list(self._serving)

    async def _serve(self, stream: Stream) -> None:
        if self._handler is not None:
            await self._handler(stream)

    async def _serve_members(self, protocol: str, handler: AddressedHandler) -> None:
        """Answer a protocol; in a private swarm, whoever opens a stream must first prove that it is a member."""

        async def serve(stream: FrameStream, address: str) -> None:
            if self._gate is not None:
                await self._gate.admit(stream)
            await handler(stream, address)

        await self._answer(protocol, serve)

    async def _answer(self, protocol: str, serve: AddressedHandler) -> None:
        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(FrameStream(info.peer_id.to_base58(), reader, writer), str(info.addr))

        await self._accept(protocol, accept)

    async def _accept(self, protocol: str, serve: RawHandler) -> None:
        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = f"…{info.peer_id.to_base58()[-6:]}"
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            task.add_done_callback(_log_fault)
            try:
                await serve(info, reader, writer)
            except (SwarmError, OSError, EOFError) as error:
                logger.debug("stream of %s ended: %s", name, error)
            except asyncio.CancelledError:  # asyncio would log it with a traceback
                logger.debug("stream of %s ended: this peer is shutting down", name)
            finally:
                self._serving.discard(task)
                writer.close()

        await self._p2p.add_binary_stream_handler(protocol, accept)


def _log_fault(task: asyncio.Task[None]) -> None:
    """What a stream's handler raises against its rules is a fault of this peer; it ends that stream only."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("answering a stream failed", exc_info=error)
