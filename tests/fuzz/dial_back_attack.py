"""Hostile messages to the protocol by which peers dial back, and machines that must not be dialed for attackers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec

from swarm.errors import PeerLost, ProtocolViolation
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.transport.p2p import Peer
from swarm.transport.reach.dial_back import BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S
from tests.fuzz.attackers import Attackers
from tests.fuzz.kinds import Violation
from tests.fuzz.mutations import broken_bytes, mutated
from tests.fuzz.targets import Targets

HOST, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""From where the attackers come, and the address of another machine."""

LISTEN_S = 1.0
TRIES_A_DIAL = 3
"""Connections that a daemon may open when it is told to dial one address."""


class DialBackAttack:
    """Asks peers to dial back, rightly and wrongly.

    At one port, which all requests name, something listens that is no peer: at the attackers' own address, and at
    another one, where no peer may ever dial.
    """

    def __init__(self, outcomes: Counter[str]) -> None:
        self._outcomes = outcomes
        self._attackers = Attackers()
        self._servers: list[asyncio.Server] = []
        self._dialed: Counter[str] = Counter()

    async def open(self, targets: Targets) -> None:
        """Join, and listen."""
        bootstraps = [address.rpartition("/p2p/")[2] for address in targets.bootstrap_addresses]
        self._asked = [*(server.peer_id for server in targets.servers), *bootstraps]
        await self._attackers.open(targets, 0, 1)  # of its own: it has connections to it closed
        self._port = 0
        for host in (HOST, ELSEWHERE):
            server = await asyncio.start_server(self._note, host, self._port)
            self._port = server.sockets[0].getsockname()[1]
            self._servers.append(server)
        self._began = time.monotonic()

    async def close(self) -> None:
        """Give everything back. Raises `Violation` if another machine was dialed, or this one too often."""
        for server in self._servers:
            server.close()
        await self._attackers.close()
        if self._servers:
            self._judge()

    async def send(self, random: random.Random) -> int:
        """Send one thing, and judge what comes back; how many messages it was."""
        peer: Peer = self._attackers.peers[0]
        try:
            stream: Any = await peer._streams.open_dial_back(random.choice(self._asked))
        except PeerLost:
            self._outcomes["not connected"] += 1  # it has just had its connections closed
            return 1
        try:
            stream._writer.write(hostile_frame(random, self._port, self._asked))
            await stream._writer.drain()
            await self._listen(stream)
        finally:
            stream.close()
        self._judge()
        return 1

    def _note(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._dialed[writer.get_extra_info("sockname")[0]] += 1
        writer.close()

    async def _listen(self, stream: Any) -> None:
        try:
            async with asyncio.timeout(LISTEN_S):
                frame = await stream.receive()
            self._outcomes[judged(frame.header, self._port)] += 1
        except TimeoutError:
            self._outcomes["not answered"] += 1
        except PeerLost:
            self._outcomes["closed"] += 1

    def _judge(self) -> None:
        if self._dialed[ELSEWHERE]:
            raise Violation(f"{ELSEWHERE} was dialed for an attacker at {HOST}")
        allowed = BURST_OF_NETWORK + (time.monotonic() - self._began + 1.0) * REFILL_OF_NETWORK_PER_S
        if self._dialed[HOST] > len(self._asked) * TRIES_A_DIAL * allowed:
            raise Violation(f"{self._dialed[HOST]} dials for one attacker, by {len(self._asked)} peers")


def hostile_frame(random: random.Random, port: int, peers: list[str]) -> bytes:
    """A frame for the protocol by which peers dial back: right, nearly right, or nothing of the kind."""
    choose = random.choice
    message = choose(
        (
            *(messages.DialBackRequest([port]),) * 4,
            messages.DialBackRequest([port] * 4),
            messages.DialBackRequest([]),
            messages.UnreachableNotice(choose(peers)),
            messages.LookAgain(),
            messages.ForgetConnections(),
            messages.DialBackReply(ELSEWHERE, [port]),
            messages.Refusal("request_refused", "no", 1),
            messages.InfoRequest(),
        )
    )
    header, payload = messages.encode(message), choose((b"", b"", b"", bytes(1), bytes(4096)))
    match random.randrange(5):
        case 0:
            # What an encoder for it cannot make; it may be too much even for msgpack.
            with suppress(OverflowError, msgspec.ValidationError):
                header = messages.encode(mutated(random, message))
        case 1:
            header = broken_bytes(random, header)
        case 2:
            header = msgspec.msgpack.encode(choose(elsewhere(port)))
        case 3:
            frame = encode_prefix(len(header), len(payload)) + header + payload
            return choose((frame[: random.randrange(len(frame))], broken_bytes(random, frame), random.randbytes(100)))
    return encode_prefix(len(header), len(payload)) + header + payload


def elsewhere(port: int) -> list[Any]:
    """Requests to dial another machine, in whatever field it may be named."""
    address = f"/ip4/{ELSEWHERE}/tcp/{port}"
    return [
        ["DialBackRequest", [port], ELSEWHERE],
        ["DialBackRequest", [address]],
        ["DialBackRequest", [f"{ELSEWHERE}:{port}"]],
        ["DialBackRequest", address],
        ["DialBackRequest", {ELSEWHERE: port}],
        ["DialBackRequest", [[ELSEWHERE, port]]],
        {"type": "DialBackRequest", "ports": [port], "host": ELSEWHERE},
        ["UnreachableNotice", address],
    ]


def judged(header: bytes, port: int) -> str:
    """What an answer is, for the table. Raises `Violation` if it may not be given."""
    try:
        answer = messages.decode_reachability(header)
    except ProtocolViolation as error:
        raise Violation(f"a request to dial back was answered with what is no answer: {error}") from None
    if isinstance(answer, messages.Refusal):
        if answer.code != "request_refused":
            raise Violation(f"a request to dial back was refused with {answer.code}: {answer.message}")
        return answer.code
    if not isinstance(answer, messages.DialBackReply):
        raise Violation(f"a request to dial back was answered with {type(answer).__name__}")
    if answer.host != HOST or port in answer.reached:
        raise Violation(f"a peer says that it has reached this one at {answer.host}, ports {answer.reached}")
    return type(answer).__name__
