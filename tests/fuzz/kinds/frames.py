"""Bytes and frames on streams: cut, dripped, interleaved, huge, or no frames at all."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from swarm.data_structures import WireFormat
from swarm.errors import PeerLost, ProtocolViolation
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.protocol.framing import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, encode_prefix
from swarm.transport.p2p import Peer
from tests.fuzz.attackers import Attackers
from tests.fuzz.kinds import Kind, Violation, gather_all
from tests.fuzz.mutations import broken_bytes, mutated
from tests.fuzz.session_model import TOKENS
from tests.fuzz.side_protocols import DialBackAttack, WeightsAttack
from tests.fuzz.targets import ServerTarget, Targets

PEERS = 2
CASES = 32
"""Streams of a batch, side by side."""

LISTEN_S = 1.0
"""How long an attacker listens after its last byte. A server may well wait for the rest of a frame."""

DRIP_S = 0.02
STREAMS_AT_ONCE = 24
DEEP = 100_000
"""Levels of nested arrays, a byte each."""

Send = Callable[["_Attack"], Awaitable[int]]


class Frames(Kind):
    name = "frames"
    share = 20

    def __init__(self) -> None:
        super().__init__()
        self._attackers = Attackers()
        self._dial_back = DialBackAttack(self.outcomes)
        self._weights = WeightsAttack(self.outcomes)

    async def open(self, targets: Targets) -> None:
        self._targets = targets
        self._revision = open_checkpoint(targets.model_folder).revision
        await self._attackers.open(targets, 0, PEERS)
        await self._dial_back.open(targets)
        await self._weights.open(targets)

    async def send(self, random: random.Random) -> int:
        attacks = [self._attack(random) for _ in range(CASES)]
        await gather_all(attack.run() for attack in attacks)
        return sum(attack.sent for attack in attacks)

    def _attack(self, random_of_batch: random.Random) -> _Attack:
        own = random.Random(random_of_batch.getrandbits(64))
        peer, server = own.choice(self._attackers.peers), own.choice(self._targets.servers)
        return _Attack(self, peer, server, self._revision, own)

    async def close(self) -> None:
        await self._attackers.close()
        await self._dial_back.close()


class _Attack:
    """What one stream sends.

    Attributes:
        sent: frames, whole or not.
    """

    def __init__(self, kind: Frames, peer: Peer, server: ServerTarget, revision: str, random: random.Random) -> None:
        self.sent = 0
        self._outcomes = kind.outcomes
        self._dial_back = kind._dial_back
        self._weights = kind._weights
        self._peer = peer
        self._server = server
        self._revision = revision
        self._random = random

    async def run(self) -> None:
        """Send one of the things that a server must stand."""
        ways = {
            self._noise: 2,
            self._prefixes: 3,
            self._cut: 3,
            self._broken: 8,
            self._mutated: 8,
            self._deep: 1,
            self._dripped: 2,
            self._interleaved: 3,
            self._pipelined: 4,
            self._many_streams: 2,
            self._not_for_servers: 2,
            self._not_libp2p: 1,
            self._asked_to_dial_back: 3,
            self._asked_for_weights: 3,
        }
        way = self._random.choices(list(ways), list(ways.values()))[0]
        with suppress(OSError, RuntimeError):  # the server has ended the stream, which is its right
            await way()

    def _valid(self) -> tuple[Any, bytes]:
        """Some message that a server would answer, and its payload."""
        server, choose = self._server, self._random.choice
        wire, tokens = WireFormat.NONE, choose((1, 2, 5))
        payload = b"".join(self._random.choices(TOKENS, k=tokens))
        span = self._revision, server.start, server.end
        session_id = self._random.randbytes(16)
        step = messages.StepRequest(0, [0], [tokens], wire, "float32")
        forged = messages.Signed(self._random.randbytes(choose((0, 80, 2048))), b"ssh-rsa AAAA", b"====")
        prefix = choose((None, messages.PrefixOf(self._random.randbytes(16), choose((0, 1, 2**31 - 2)))))
        points = choose((None, messages.Points(forged, (forged,) * choose((0, 4)))))
        return choose(
            (
                (messages.OpenSession(session_id, *span, choose((1, 8, 64)), wire, points=points, prefix=prefix), b""),
                (messages.SignedTab(forged), b""),
                (step, payload),
                (messages.PushRequest(self._peer.peer_id, session_id, step), payload),
                (messages.ReplayRequest(0, [0], [tokens], wire, "float32", None, True), payload),
                (messages.SetNeighbors(self._peer.peer_id, server.peer_id, session_id), b""),
                (messages.GiveUp(0, 1), b""),
                (messages.CloseSession(choose((0, 1, 64, 2**31 - 1))), b""),
                (messages.ReceiptRequest(choose((0, 1, 2**31 - 2))), b""),
                (messages.ForwardRequest(*span, [tokens], wire, "float32", wire), payload),
                (messages.BackwardRequest(*span, [tokens], wire, "float32", wire), payload * 2),
                (messages.PutAdapters(server.start, [_adapter(session_id)], "float32"), bytes(4 * 384)),
                (messages.ProbeRequest(choose((0, 1, 4096))), payload),
                (messages.InfoRequest(), b""),
            )
        )

    def _frame(self, header: bytes, payload: bytes = b"") -> bytes:
        return encode_prefix(len(header), len(payload)) + header + payload

    async def _stream(self) -> Any:
        try:
            return await self._peer.open_stream(self._server.peer_id)
        except PeerLost as error:
            raise Violation(f"{self._server.name} accepts no stream: {error}") from None

    async def _write(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Write pieces to a stream of their own, listen to what comes back, and leave in one of three ways."""
        stream = await self._stream()
        try:
            for piece in pieces:
                stream._writer.write(piece)
                await stream._writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
            if self._random.random() < 0.3:
                stream._writer.write_eof()
            await self._listen(stream)
        finally:
            if self._random.random() < 0.5:
                stream.abort()
            else:
                stream.close()

    async def _listen(self, stream: Any) -> None:
        """Whatever comes back has to be answers, whole ones."""
        heard = 0
        try:
            async with asyncio.timeout(LISTEN_S):
                while True:
                    frame = await stream.receive()
                    answer = messages.decode_server(frame.header)
                    heard += 1
                    refused = isinstance(answer, messages.Refusal)
                    self._outcomes[answer.code if refused else type(answer).__name__] += 1
                    if refused and answer.code == "server_fault":
                        raise Violation(f"{self._server.name} had a fault of its own: {answer.message}")
        except TimeoutError:
            if not heard:
                self._outcomes["not answered"] += 1
        except PeerLost:
            if not heard:
                self._outcomes["closed"] += 1
        except ProtocolViolation as error:
            raise Violation(f"{self._server.name} answered what is no answer: {error}") from None

    async def _noise(self) -> None:
        self.sent += 1
        await self._write(self._random.randbytes(self._random.choice((1, 11, 12, 13, 100, 4096, 70_000))))

    async def _prefixes(self) -> None:
        """Lengths that nobody may announce, or that do not fit to what follows."""
        self.sent += 1
        header = messages.encode(self._valid()[0])
        choose = self._random.choice
        lengths = (
            0,
            1,
            len(header) - 1,
            len(header),
            len(header) + 1,
            MAX_HEADER_BYTES,
            MAX_HEADER_BYTES + 1,
            2**32 - 1,
        )
        payloads = (0, 1, 1 << 20, 1 << 27, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 2**63 - 1, 2**63, 2**64 - 1)
        await self._write(struct.pack(">IQ", choose(lengths), choose(payloads)) + header + bytes(choose((0, 1, 4096))))

    async def _cut(self) -> None:
        self.sent += 1
        message, payload = self._valid()
        frame = self._frame(messages.encode(message), payload)
        await self._write(frame[: self._random.randrange(len(frame))])

    async def _broken(self) -> None:
        """Frames whose lengths are right, around headers that are none."""
        for _ in range(self._random.choice((1, 1, 3))):
            self.sent += 1
            message, payload = self._valid()
            header = messages.encode(message)
            for _ in range(self._random.choice((1, 1, 2, 5))):
                header = broken_bytes(self._random, header)
            await self._write(self._frame(header, payload))

    async def _mutated(self) -> None:
        """Several messages with a wrong value each, until one ends the stream."""
        pieces = []
        for _ in range(self._random.choice((1, 2, 5))):
            message, payload = self._valid()
            if self._random.random() < 0.7:
                message = mutated(self._random, message)
            if self._random.random() < 0.3:
                payload = broken_bytes(self._random, payload)
            pieces.append(self._frame(messages.encode(message), payload))
        self.sent += len(pieces)
        await self._write(*pieces)

    async def _deep(self) -> None:
        """Arrays in arrays, maps with a billion entries, texts that are not UTF-8."""
        self.sent += 1
        many = msgspec.msgpack.encode(type(self._valid()[0]).__name__)
        headers = (
            b"\x91" * DEEP + b"\xc0",
            b"\x81\xa1a" * (DEEP // 3) + b"\xc0",
            b"\xdd\xff\xff\xff\xff" + many,
            b"\xdf\xff\xff\xff\xff" + many,
            b"\x92" + many + b"\xdb\xff\xff\xff\xff",
            b"\x92" + many + b"\xc6\xff\xff\xff\xff",
            b"\x92" + many + b"\xa2\xff\xfe",
            b"\x92" + many + b"\xc7\x00\x05",
            b"\x92" + many + b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
            b"",
        )
        await self._write(self._frame(self._random.choice(headers)))

    async def _dripped(self) -> None:
        """A few bytes at a time."""
        self.sent += 1
        message, payload = self._valid()
        frame = self._frame(messages.encode(message), payload)[:200]
        size = self._random.choice((5, 11, 40))
        await self._write(*(frame[at : at + size] for at in range(0, len(frame), size)), pause_s=DRIP_S)

    async def _interleaved(self) -> None:
        """Pieces of two frames in turns, as if two writers shared the stream."""
        frames = []
        for _ in range(2):
            message, payload = self._valid()
            frames.append(self._frame(messages.encode(message), payload))
        self.sent += 2
        first, other = frames
        size = self._random.choice((1, 12, 64, 1000))
        mixed = b"".join(first[at : at + size] + other[at : at + size] for at in range(0, max(map(len, frames)), size))
        await self._write(mixed)

    async def _pipelined(self) -> None:
        """Many whole frames in one write, of which no answer is read before all are sent."""
        count = self._random.choice((2, 10, 20))
        frames = []
        for _ in range(count):
            message, payload = self._valid()
            frames.append(self._frame(messages.encode(message), payload))
        self.sent += count
        await self._write(b"".join(frames))

    async def _many_streams(self) -> None:
        """Streams that say nothing, or little, all at once."""
        streams = await asyncio.gather(*(self._stream() for _ in range(STREAMS_AT_ONCE)))
        self.sent += len(streams)
        for stream in streams:
            with suppress(OSError, RuntimeError):
                stream._writer.write(self._random.randbytes(self._random.choice((0, 1, 11, 12))))
        await asyncio.sleep(self._random.choice((0.0, 0.1)))
        for stream in streams:
            stream.abort()
        self._outcomes["not answered"] += len(streams)

    async def _not_for_servers(self) -> None:
        """What servers and members say, said to a server."""
        self.sent += 1
        message = self._random.choice(
            (
                messages.SessionOpened(0),
                messages.Refusal("server_closing", "this server is leaving", 1),
                messages.StepReply(0, WireFormat.NONE, "float32", 1.0, bytes(32)),
                messages.InfoReply(0, 4, 2**48, 0, "9"),
                messages.Receipt(bytes(2048), b"ssh-rsa", b""),
                messages.TabKept(messages.Signed(bytes(2048), b"ssh-rsa", b"")),
                messages.MemberChallenge(bytes(32)),
                messages.NewerRevocations(),
            )
        )
        await self._write(self._frame(messages.encode(message), self._random.choice((b"", bytes(4096)))))

    async def _asked_to_dial_back(self) -> None:
        """What peers say to each other about being reached."""
        self.sent += await self._dial_back.send(self._random)

    async def _asked_for_weights(self) -> None:
        """What peers say to a holder of weights."""
        self.sent += await self._weights.send(self._random, self._peer, self._server.peer_id)

    async def _not_libp2p(self) -> None:
        """Bytes at the port of the libp2p daemon."""
        self.sent += 1
        port = int(self._server.addresses[0].split("/")[4])
        with socket.socket() as plain:
            plain.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(plain, ("127.0.0.1", port))
            await loop.sock_sendall(
                plain, self._random.choice((b"GET / HTTP/1.0\r\n\r\n", self._random.randbytes(1000)))
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await loop.sock_recv(plain, 4096)
        self._outcomes["closed"] += 1


def _adapter(digest: bytes) -> messages.BlockAdapterSpec:
    return messages.BlockAdapterSpec(digest, 0, [messages.LoraShape("self_attn.q_proj", 1, 192, 192)])
