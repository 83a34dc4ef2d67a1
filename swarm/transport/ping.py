"""Measuring the link to another peer: round trips and bandwidth.

Every measurement ends in time. A wrong answer, or none, is raised as a `RemoteError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import PeerLost, ProtocolViolation, RemoteError, remote_error
from swarm.protocol import messages
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=messages.ServerMessage)

PING_SAMPLES = 3
"""Round trips of one ping, after the one that opens the connection. The shortest counts: the others met other work."""

PING_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 15.0
"""Time limits for all exchanges of one ping, or of all probes, with one peer. Connecting is included."""

PROBE_SIZES_BYTES = (1 << 14, 1 << 16, 1 << 18, messages.MAX_PROBE_BYTES)
"""Sizes of the successive probes: at most 1.3 MiB in each direction."""

MIN_PROBE_DURATION_S = 0.1
"""A probe must take this much longer than a round trip to tell the bandwidth."""


MIN_MEASURED_S = 1e-6
"""No probe counts as quicker, so that no clock is too coarse for it."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of a link in bytes/s: from this peer (`up`) and to it (`down`)."""

    up: float
    down: float


async def measure_round_trip(network: Network, peer_id: str, timeout_s: float = PING_TIMEOUT_S) -> float:
    """The shortest of a few round trips over one open stream, in seconds, without the time to connect.

    Raises:
        PeerLost: the peer cannot be reached or does not answer within `timeout_s` seconds.
        ProtocolViolation: it answered with something else.
        RemoteError: it refused; the error is the one that it sent.
    """
    async with _stream_with_timeout(network, peer_id, timeout_s) as stream:
        return await _shortest_round_trip(stream)


async def ping_many(
    network: Network,
    peer_ids: Iterable[str],
    concurrency: int = 16,
    limit: float = 5.0,
    timeout_s: float = PING_TIMEOUT_S,
) -> dict[str, float]:
    """Round trips in seconds to several peers, `concurrency` at a time, within `limit` seconds altogether.

    The result leaves out peers whose measurement failed and peers that the time limit did not leave time for.
    """
    found: dict[str, float] = {}
    remaining = iter(dict.fromkeys(peer for peer in peer_ids if peer != network.peer_id))

    async def measure_remaining() -> None:
        for peer in remaining:
            try:
                found[peer] = await measure_round_trip(network, peer, timeout_s)
            except RemoteError as error:
                logger.debug("…%s was not pinged: %s", peer[-6:], error)

    try:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(measure_remaining())
    except TimeoutError:
        pass
    return found


async def measure_bandwidth(network: Network, peer_id: str, timeout_s: float = PROBE_TIMEOUT_S) -> Bandwidth:
    """Measure a link's bandwidth with growing probes. Raises the same errors as `measure_round_trip`."""
    async with _stream_with_timeout(network, peer_id, timeout_s) as stream:
        latency = await _shortest_round_trip(stream)
        return Bandwidth(
            await _throughput(stream, latency, upward=True),
            await _throughput(stream, latency, upward=False),
        )


async def _throughput(stream: Stream, latency: float, upward: bool) -> float:
    """Measured bandwidth in one direction."""
    for size in PROBE_SIZES_BYTES:
        began = time.perf_counter()
        request = messages.ProbeRequest(0 if upward else size)
        await _request(stream, request, messages.ProbeReply, bytes(size if upward else 0), request.reply_bytes)
        elapsed = time.perf_counter() - began
        # Even if the measured round trip was slow by chance, or the peer has answered before it was asked.
        taken = max(elapsed - latency, elapsed / 10, MIN_MEASURED_S)
        # On a link with a long round trip, a short probe measures TCP's slow start instead of the bandwidth.
        if taken > max(MIN_PROBE_DURATION_S, 4 * latency):
            break
    return size / taken


async def _shortest_round_trip(stream: Stream) -> float:
    times = []
    for _ in range(1 + PING_SAMPLES):
        began = time.perf_counter()
        await _request(stream, messages.InfoRequest(), messages.InfoReply)
        times.append(time.perf_counter() - began)
    return min(times[1:])


async def _request(
    stream: Stream, request: messages.Message, expected: type[R], payload: bytes = b"", reply_bytes: int = 0
) -> R:
    """Send a request and wait for a reply of the expected type and size. A refusal is raised as its error."""
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
async def _stream_with_timeout(network: Network, peer_id: str, timeout_s: float) -> AsyncIterator[Stream]:
    """An open stream for `timeout_s` seconds, including the time to connect. Raises `PeerLost` when they are over."""
    try:
        async with asyncio.timeout(timeout_s):
            with closing(await network.open_stream(peer_id)) as stream:
                yield stream
    except TimeoutError:
        raise PeerLost(f"peer …{peer_id[-6:]} did not answer within {timeout_s:g} s") from None
