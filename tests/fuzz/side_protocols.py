"""Hostile messages to the protocols by which peers dial back, and get weights from each other."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from swarm.errors import PeerLost, ProtocolViolation
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.shared_weights.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, all_parts
from swarm.transport.p2p import Peer
from swarm.transport.reach.dial_back import BURST_OF_NETWORK, REFILL_OF_NETWORK_PER_S
from tests.fuzz.attackers import Attackers
from tests.fuzz.kinds import Violation
from tests.fuzz.mutations import broken_bytes, mutated
from tests.fuzz.targets import Targets

LISTEN_S = 1.0
HOST, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""From where the attackers come, and the address of another machine."""

TRIES_A_DIAL = 3
"""Connections that a daemon may open when it is told to dial one address."""

MAX_ANSWER_BYTES = max(CHUNK_BYTES, MAX_MANIFEST_BYTES)
WEIGHTS_REFUSALS = frozenset(
    {"protocol_violation", "request_refused", "weights_not_shared", "weights_not_ready", "too_many_downloads"}
)
"""What a holder of weights may say: that it cannot read its own weights is a fault."""


async def listen(stream: Any, judge: Callable[[bytes, int], str], outcomes: Counter[str], silence: str) -> None:
    """Hear answers for a while. Raises `Violation` for what is none.

    Args:
        judge: gives the outcome of an answer, by its header and the length of its payload.
        silence: the outcome if nothing is heard.
    """
    heard = 0
    try:
        async with asyncio.timeout(LISTEN_S):
            await stream._writer.drain()
            while True:
                frame = await stream.receive(MAX_ANSWER_BYTES)
                heard += 1
                outcomes[judge(frame.header, len(frame.payload))] += 1
    except (TimeoutError, PeerLost, OSError):
        if not heard:
            outcomes[silence] += 1
    except ProtocolViolation as error:
        raise Violation(f"a request was answered with no frame: {error}") from None


def hostile_frame(random: random.Random, message: Any, payload: bytes, odds: int) -> bytes:
    """A frame that is right, or, in three of so many cases, nearly right or nothing of the kind."""
    header = messages.encode(message)
    match random.randrange(odds):
        case 0:
            # What an encoder for it cannot make; it may be too much even for msgpack.
            with suppress(OverflowError, msgspec.ValidationError):
                header = messages.encode(mutated(random, message))
        case 1:
            header = broken_bytes(random, header)
        case 2:
            frame = encode_prefix(len(header), len(payload)) + header + payload
            return random.choice((frame[: random.randrange(len(frame))], broken_bytes(random, frame)))
    return encode_prefix(len(header), len(payload)) + header + payload


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
            stream._writer.write(dial_back_frame(random, self._port, self._asked))
            await listen(stream, lambda header, _: judge_dial_back(header, self._port), self._outcomes, "not answered")
        finally:
            stream.close()
        self._judge()
        return 1

    def _note(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._dialed[writer.get_extra_info("sockname")[0]] += 1
        writer.close()

    def _judge(self) -> None:
        if self._dialed[ELSEWHERE]:
            raise Violation(f"{ELSEWHERE} was dialed for an attacker at {HOST}")
        allowed = BURST_OF_NETWORK + (time.monotonic() - self._began + 1.0) * REFILL_OF_NETWORK_PER_S
        if self._dialed[HOST] > len(self._asked) * TRIES_A_DIAL * allowed:
            raise Violation(f"{self._dialed[HOST]} dials for one attacker, by {len(self._asked)} peers")


def dial_back_frame(random: random.Random, port: int, peers: list[str]) -> bytes:
    """A frame for the protocol by which peers dial back, which often names another machine, in any field."""
    choose = random.choice
    if choose((True, False, False, False, False)):
        address = f"/ip4/{ELSEWHERE}/tcp/{port}"
        forms: tuple[Any, ...] = (
            ["DialBackRequest", [port], ELSEWHERE],
            *(["DialBackRequest", one] for one in ([address], [f"{ELSEWHERE}:{port}"], address, {ELSEWHERE: port})),
            ["DialBackRequest", [[ELSEWHERE, port]]],
            {"type": "DialBackRequest", "ports": [port], "host": ELSEWHERE},
            ["UnreachableNotice", address],
        )
        header = msgspec.msgpack.encode(choose(forms))
        return encode_prefix(len(header), 0) + header
    message = choose(
        (
            *(messages.DialBackRequest([port]),) * 4,
            *(messages.DialBackRequest([port] * 4), messages.DialBackRequest([])),
            *(messages.UnreachableNotice(choose(peers)), messages.LookAgain(), messages.ForgetConnections()),
            *(messages.DialBackReply(ELSEWHERE, [port]), messages.Refusal("request_refused", "no", 1)),
            messages.InfoRequest(),
        )
    )
    return hostile_frame(random, message, choose((b"", b"", b"", bytes(1), bytes(4096))), odds=4)


def judge_dial_back(header: bytes, port: int) -> str:
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


class WeightsAttack:
    """Asks servers for weights, rightly and wrongly, and sometimes reads nothing."""

    def __init__(self, outcomes: Counter[str]) -> None:
        self._outcomes = outcomes

    async def open(self, targets: Targets) -> None:
        """Learn what there is to ask for."""
        checkpoint = open_checkpoint(targets.model_folder)
        self._about = checkpoint.name, checkpoint.revision, checkpoint.blocks

    async def send(self, random: random.Random, peer: Peer, server: str) -> int:
        """Send one conversation, and judge what comes back; how many messages it was."""
        try:
            stream: Any = await peer.open_weights_stream(server)
        except PeerLost as error:
            raise Violation(f"a server accepts no stream for weights: {error}") from None
        frames = weights_conversation(random, *self._about)
        try:
            for frame in frames:
                stream._writer.write(frame)
            if random.random() < 0.8:  # else nothing is read, however much was asked for
                await listen(stream, judge_weights, self._outcomes, "no weights")
        finally:
            stream.abort()
        return len(frames)


def weights_conversation(random: random.Random, model: str, revision: str, blocks: int) -> list[bytes]:
    """Frames for the protocol of weights: right ones, nearly right ones, or nothing of the kind."""
    first = messages.FindParts(random.choice((model, model, model, "another")), random.choice((revision, "")))
    count = random.choice((0, 1, 2, 8, 40))
    said: list[Any] = [first, *(_weights_request(random, blocks) for _ in range(count))]
    if random.random() < 0.2:
        random.shuffle(said)
    payloads = (b"",) * 20 + (bytes(1), bytes(4096))
    return [hostile_frame(random, message, random.choice(payloads), odds=12) for message in said]


def _weights_request(random: random.Random, blocks: int) -> Any:
    part = random.choice((*all_parts(blocks), str(blocks), "9999"))
    item, chunk = random.choice((0, 1, 5, 10**6)), random.choice((0, 0, 0, 1, 2**31 - 1))
    return random.choice(
        (
            *(messages.GetChunk(part, item, chunk),) * 4,
            *(messages.GetChunkDigests(part), messages.GetManifest(part), messages.FindParts("another", "")),
            *(messages.PartsFound("main", blocks, {"0": bytes(32)}), messages.PartData()),
            *(messages.Refusal("request_refused", "no", 1), messages.InfoRequest()),
        )
    )


def judge_weights(header: bytes, payload: int) -> str:
    """What an answer is, for the table. Raises `Violation` if it may not be given."""
    try:
        answer = messages.decode_weights(header)
    except ProtocolViolation as error:
        raise Violation(f"a request for weights was answered with what is no answer: {error}") from None
    if isinstance(answer, messages.Refusal):
        if answer.code not in WEIGHTS_REFUSALS:
            raise Violation(f"a request for weights was refused with {answer.code}: {answer.message}")
        return answer.code
    if not isinstance(answer, (messages.PartsFound, messages.PartData)):
        raise Violation(f"a request for weights was answered with {type(answer).__name__}")
    if payload and isinstance(answer, messages.PartsFound):
        raise Violation(f"the parts that were found came with {payload} bytes")
    return type(answer).__name__
