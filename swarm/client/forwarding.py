"""Batches without a session: forwards of whole sequences, split among several routes at once.

The portions are sized by throughput, so that all should come back at about the same time (SWARM parallelism, Ryabinin
et al. 2023). One that does not is sent again from the block where it was lost, and the server that kept it waiting is
left alone from then on: nobody waits for a straggler twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from swarm.client.failover import TRIES, Planner, is_hop_lost
from swarm.client.hop_session import TRAVEL, Outputs, checked, out_of_place, whose
from swarm.client.packed import Manner, Packed
from swarm.client.patience import Patience
from swarm.data_structures import Hop, Route, Span, StepLayout
from swarm.errors import PeerLost, PeerSilent, RemoteError, remote_error
from swarm.protocol import messages
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)


class Forwarder(Protocol):
    """Sends one request to one server; see `forward`."""

    async def __call__(self, network: Network, hop: Hop, manner: Manner, hidden: Packed, layout: StepLayout) -> Packed:
        """The outputs of the blocks `hop.span`."""


@dataclass(frozen=True)
class Portion:
    """Whole sequences and the route that they should take."""

    hidden: Packed
    layout: StepLayout
    route: Route


async def forward_all(
    network: Network, planner: Planner, manner: Manner, span: Span, portions: list[Portion]
) -> list[Packed]:
    """The outputs of the blocks of `span`, in the order of the portions.

    Raises:
        MissingBlocks: servers failed, and nobody else holds their blocks.
        RemoteError: a server refused the request as wrong, or all that were tried failed.
    """
    lost: set[str] = set()
    work = [_complete(network, planner, manner, span, portion, lost) for portion in portions]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _complete(
    network: Network, planner: Planner, manner: Manner, span: Span, portion: Portion, lost: set[str]
) -> Packed:
    """One portion through all blocks, whatever happens to the servers. `lost` are those that failed any portion."""
    portion.hidden.check()
    hidden, block = portion.hidden, span.start
    hops = list(portion.route.hops)
    tries, deadline = 0, time.perf_counter() + planner.patience
    while hops:
        hop = hops.pop(0)
        if hop.server.peer_id in lost:
            hops = await _other_way(planner, Span(block, span.end))
            hop = hops.pop(0)
        try:
            hidden = await forward(network, hop, manner, hidden, portion.layout)
            block = hop.span.end
            planner.succeeded(hop.server.peer_id)
        except RemoteError as error:
            if not is_hop_lost(error):
                raise
            planner.failed(hop.server.peer_id, error)
            lost.add(hop.server.peer_id)
            tries += 1
            if tries >= TRIES and time.perf_counter() >= deadline:
                raise
            logger.info("%s; trying another server", error)
            hops = await _other_way(planner, Span(block, span.end))
    return hidden


async def _other_way(planner: Planner, span: Span) -> list[Hop]:
    return list((await planner.route(span, None, None, 0)).hops)


async def forward(network: Network, hop: Hop, manner: Manner, hidden: Packed, layout: StepLayout) -> Packed:
    """Run packed sequences through one server's blocks; the server keeps nothing.

    Raises `RemoteError` of the fitting kind; `PeerSilent` when it takes much longer than such work should.
    """
    patience = _expected(hop, manner).allowed(layout.tokens)
    request = messages.ForwardRequest(
        revision=manner.revision,
        start=hop.span.start,
        end=hop.span.end,
        counts=list(layout.counts),
        format=hidden.wire,
        dtype=hidden.dtype,
        reply_format=manner.wire,
        offsets=list(layout.offsets) if layout.offsets is not None else None,
    )
    outputs = Outputs(hidden.tokens, hidden.hidden_size)
    try:
        async with asyncio.timeout(patience):
            stream = await network.open_stream(hop.server.peer_id)
            try:
                await stream.send(request, hidden.payload)
                frame = await stream.receive(4 * outputs.values)
            finally:
                stream.close()
    except TimeoutError:
        raise PeerSilent(f"{whose(hop)} did not answer within {patience:.1f} s") from None
    except PeerLost as error:
        raise PeerLost(f"{whose(hop)} is gone: {error}") from None
    reply = messages.decode_server(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"{whose(hop)} refused: {reply.message}")
    if not isinstance(reply, messages.ForwardReply):
        raise out_of_place(hop, reply)
    return checked(hop, outputs, frame.payload, reply)


def _expected(hop: Hop, manner: Manner) -> Patience:
    """What a server announces of itself is all that is known of work that it has not done yet."""
    server = hop.server
    token = hop.span.length / max(server.forward_throughput or server.throughput, 1e-3)
    if server.network_throughput:
        token += 2 / server.network_throughput
    return Patience(TRAVEL + server.queue + hop.span.length / max(server.throughput, 1e-3), token, manner.timeout)
