"""Batches without a session: forwards of whole sequences, split among several routes at once.

The portions are sized by throughput, so that all should come back at about the same time (SWARM parallelism, Ryabinin
et al. 2023). One that does not is sent again from the block where it was lost, and the server that kept it waiting is
left alone from then on: nobody waits for a straggler twice.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from swarm.client.answers import Outputs, accepted, answering, checked, expected, out_of_place
from swarm.client.failover import TRIES, Planner, Waiting, is_hop_lost
from swarm.client.packed import Manner, Packed
from swarm.data_structures import Hop, Route, Span, StepLayout
from swarm.errors import MissingBlocks, RemoteError
from swarm.protocol import messages
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)


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
    tries, waiting = 0, Waiting(planner)
    while hops:
        hop = hops.pop(0)
        if hop.server.peer_id in lost:
            hops = await _other_way(planner, Span(block, span.end), waiting)
            hop = hops.pop(0)
        try:
            slowness = planner.slowness(hop.server.peer_id)
            hidden = await forward(network, hop, manner, hidden, portion.layout, slowness)
            block = hop.span.end
            planner.succeeded(hop.server.peer_id)
        except RemoteError as error:
            if not is_hop_lost(error):
                raise
            planner.failed(hop.server.peer_id, error)
            lost.add(hop.server.peer_id)
            tries += 1
            logger.info("%s; trying another server", error)
            enough = tries >= TRIES and waiting.is_over
            hops = await _other_way(planner, Span(block, span.end), waiting)
            if enough:
                raise
    return hidden


async def _other_way(planner: Planner, span: Span, waiting: Waiting) -> list[Hop]:
    """Hops over the blocks that are left. Waits for servers as a session does; raises `MissingBlocks`."""
    while True:
        try:
            return list((await planner.route(span, None, None, 0)).hops)
        except MissingBlocks as missing:
            await waiting.more(missing)


async def forward(
    network: Network, hop: Hop, manner: Manner, hidden: Packed, layout: StepLayout, slowness: float = 1.0
) -> Packed:
    """Run packed sequences through one server's blocks; the server keeps nothing.

    Raises `RemoteError` of the fitting kind; `PeerSilent` when it takes much longer than such work should.
    """
    patience = expected(hop, slowness, manner.timeout).allowed(layout.tokens)
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
    async with answering(hop, patience):
        stream = await network.open_stream(hop.server.peer_id)
        try:
            await stream.send(request, hidden.payload)
            frame = await stream.receive(4 * outputs.values)
        finally:
            stream.close()
    reply = accepted(hop, frame)
    if not isinstance(reply, messages.ForwardReply):
        raise out_of_place(hop, reply)
    return checked(hop, outputs, frame.payload, reply)
