"""Hostile messages to the protocol by which peers get weights from each other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec

from swarm.errors import PeerLost, ProtocolViolation
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.shared_weights.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, all_parts
from swarm.transport.p2p import Peer
from tests.fuzz.kinds import Violation
from tests.fuzz.mutations import broken_bytes, mutated
from tests.fuzz.targets import Targets

LISTEN_S = 1.0
MAX_ANSWER_BYTES = max(CHUNK_BYTES, MAX_MANIFEST_BYTES)

REFUSALS = frozenset(
    {
        "protocol_violation",
        "request_refused",
        "weights_not_shared",
        "weights_not_ready",
        "too_many_downloads",
    }
)
"""What a holder may say: that it cannot read its own weights is a fault."""


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
        frames = conversation(random, *self._about)
        try:
            for frame in frames:
                stream._writer.write(frame)
            if random.random() < 0.8:  # else nothing is read, however much was asked for
                await self._listen(stream)
        finally:
            stream.abort()
        return len(frames)

    async def _listen(self, stream: Any) -> None:
        heard = 0
        try:
            async with asyncio.timeout(LISTEN_S):
                await stream._writer.drain()
                while True:
                    frame = await stream.receive(MAX_ANSWER_BYTES)
                    heard += 1
                    self._outcomes[judged(frame.header, len(frame.payload))] += 1
        except (TimeoutError, PeerLost, OSError):
            if not heard:
                self._outcomes["no weights"] += 1
        except ProtocolViolation as error:
            raise Violation(f"a request for weights was answered with no frame: {error}") from None


def conversation(random: random.Random, model: str, revision: str, blocks: int) -> list[bytes]:
    """Frames for the protocol of weights: right ones, nearly right ones, or nothing of the kind."""
    first = messages.FindParts(random.choice((model, model, model, "another")), random.choice((revision, "")))
    count = random.choice((0, 1, 2, 8, 40))
    said: list[Any] = [first, *(_request(random, blocks) for _ in range(count))]
    if random.random() < 0.2:
        random.shuffle(said)
    return [_frame(random, message) for message in said]


def _request(random: random.Random, blocks: int) -> Any:
    part = random.choice((*all_parts(blocks), str(blocks), "9999"))
    item, chunk = random.choice((0, 1, 5, 10**6)), random.choice((0, 0, 0, 1, 2**31 - 1))
    return random.choice(
        (
            *(messages.GetChunk(part, item, chunk),) * 4,
            messages.GetChunkDigests(part, item),
            messages.GetManifest(part),
            messages.FindParts("another", ""),
            messages.PartsFound("main", blocks, {"0": bytes(32)}),
            messages.PartData(),
            messages.Refusal("request_refused", "no", 1),
            messages.InfoRequest(),
        )
    )


def _frame(random: random.Random, message: Any) -> bytes:
    header, payload = messages.encode(message), random.choice((b"",) * 20 + (bytes(1), bytes(4096)))
    match random.randrange(12):
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


def judged(header: bytes, payload: int) -> str:
    """What an answer is, for the table. Raises `Violation` if it may not be given."""
    try:
        answer = messages.decode_weights(header)
    except ProtocolViolation as error:
        raise Violation(f"a request for weights was answered with what is no answer: {error}") from None
    if isinstance(answer, messages.Refusal):
        if answer.code not in REFUSALS:
            raise Violation(f"a request for weights was refused with {answer.code}: {answer.message}")
        return answer.code
    if not isinstance(answer, (messages.PartsFound, messages.PartData)):
        raise Violation(f"a request for weights was answered with {type(answer).__name__}")
    if payload and isinstance(answer, messages.PartsFound):
        raise Violation(f"the parts that were found came with {payload} bytes")
    return type(answer).__name__
