"""What a link to another peer is like: round trips and bandwidth, asked of the peer itself.

Whatever a peer answers, or does not, ends in time and in a `RemoteError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import PeerLost, ProtocolViolation, remote_error
from swarm.protocol import messages
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=messages.ServerMessage)

SAMPLES = 3
"""Round trips of one ping after the one that opens the connection; the least counts, the rest was other work."""

PING_PATIENCE = 3.0
PROBE_PATIENCE = 15.0
"""Seconds that one peer gets for all exchanges of a ping or of the probes, connecting included."""

PROBES = (1 << 14, 1 << 16, 1 << 18, messages.MAX_PROBE_BYTES)
"""Bytes of one probe after the other: 1.3 MiB a direction at most."""

TELLING = 0.1
"""Seconds that a probe must take, beyond the round trip, to say something about the link."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes/s that a link carries from this peer (`up`) and to it (`down`)."""

    up: float
    down: float


async def round_trip(network: Network, peer_id: str, patience: float = PING_PATIENCE) -> float:
    """Seconds of the shortest of a few exchanges over one open stream; connecting is not counted.

    Raises:
        PeerLost: the peer cannot be reached or does not answer in `patience` seconds.
        ProtocolViolation: it answered with something else.
        RemoteError: it refused, with the error of its choice.
    """
    async with _conversation(network, peer_id, patience) as stream:
        return await _least_round_trip(stream)


async def ping_many(
    network: Network,
    peer_ids: Iterable[str],
    concurrency: int = 16,
    limit: float = 5.0,
    patience: float = PING_PATIENCE,
) -> dict[str, float]:
    """Round trips (seconds) to several peers, `concurrency` at a time, within `limit` seconds altogether.

    Peers that cannot be measured, for whatever reason, and those whose turn did not come, are left out.
    """
    found: dict[str, float] = {}
    waiting = iter(dict.fromkeys(peer for peer in peer_ids if peer != network.peer_id))

    async def work() -> None:
        for peer in waiting:
            try:
                found[peer] = await round_trip(network, peer, patience)
            except Exception as error:  # one peer must not keep the others from being measured
                logger.debug("…%s was not pinged: %r", peer[-6:], error)

    try:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except TimeoutError:
        pass
    return found


async def bandwidth(network: Network, peer_id: str, patience: float = PROBE_PATIENCE) -> Bandwidth:
    """Measure a link with probes that grow until one takes long enough to tell; raises as `round_trip` does."""
    async with _conversation(network, peer_id, patience) as stream:
        latency = await _least_round_trip(stream)
        return Bandwidth(await _rate(stream, latency, upward=True), await _rate(stream, latency, upward=False))


async def _rate(stream: Stream, latency: float, upward: bool) -> float:
    """Bytes/s in one direction."""
    for size in PROBES:
        began = time.perf_counter()
        request = messages.ProbeRequest(0 if upward else size)
        await _ask(stream, request, messages.ProbeReply, bytes(size if upward else 0), request.reply_bytes)
        elapsed = time.perf_counter() - began
        taken = max(elapsed - latency, elapsed / 10)  # a round trip that was slow by chance must not hide all
        # Beside a long round trip a short probe shows how TCP starts, not what the link carries.
        if taken > max(TELLING, 4 * latency):
            break
    return size / taken


async def _least_round_trip(stream: Stream) -> float:
    times = []
    for _ in range(1 + SAMPLES):
        began = time.perf_counter()
        await _ask(stream, messages.InfoRequest(), messages.InfoReply)
        times.append(time.perf_counter() - began)
    return min(times[1:])


async def _ask(
    stream: Stream, request: messages.Message, expected: type[R], payload: bytes = b"", reply_bytes: int = 0
) -> R:
    """Send a request and wait for the reply of the expected type and size; a refusal is raised."""
    await stream.send(request, payload)
    frame = await stream.receive(reply_bytes)
    reply = messages.decode_server(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"peer …{stream.peer_id[-6:]} refused: {reply.message}")
    if not isinstance(reply, expected) or len(frame.payload) != reply_bytes:
        raise ProtocolViolation(
            f"peer …{stream.peer_id[-6:]} answered a {type(request).__name__} with a {type(reply).__name__} of "
            f"{len(frame.payload)} bytes"
        )
    return reply


@asynccontextmanager
async def _conversation(network: Network, peer_id: str, patience: float) -> AsyncIterator[Stream]:
    """An open stream for `patience` seconds, connecting included; after them `PeerLost`."""
    try:
        async with asyncio.timeout(patience):
            stream = await network.open_stream(peer_id)
            try:
                yield stream
            finally:
                stream.close()
    except TimeoutError:
        raise PeerLost(f"peer …{peer_id[-6:]} did not answer within {patience:g} s") from None
