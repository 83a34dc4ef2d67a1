"""Forward pass of a batch without a session: whole sequences, in micro-batches that take several routes at once.

The batch is divided among routes by their throughput, so that all parts should finish at about the same time (SWARM
parallelism, Ryabinin et al. 2023). Each route's part is divided into micro-batches, so that its servers work at the
same time. When a server fails, its micro-batches are sent again, from the block where they were lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.client.batches.hop_requests import HopRequester
from swarm.client.batches.rerouting import Rerouter
from swarm.client.routes.route_source import RouteSource
from swarm.client.wire.adapter_upload import PackedAdapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, Span, StepLayout
from swarm.errors import NotFiniteOutputs, RemoteError

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences and the route that they should take."""

    hidden: PackedHidden
    layout: StepLayout
    route: Route


@dataclass(frozen=True)
class HopInputs:
    """The inputs of one hop's blocks, kept for the backward pass."""

    hop: Hop
    inputs: PackedHidden


@dataclass(frozen=True)
class ForwardTrace:
    """What the forward pass of a micro-batch leaves behind; its backward pass begins here.

    Attributes:
        layout: of the sequences.
        hop_inputs: the inputs of every hop; the hops cover the blocks in order. Empty if they were not kept.
        outputs: the outputs of the last hop.
    """

    layout: StepLayout
    hop_inputs: tuple[HopInputs, ...]
    outputs: PackedHidden


@dataclass
class PassContext:
    """What the micro-batches of one forward or backward pass share.

    Attributes:
        requester: sends the requests.
        planner: finds routes.
        adapter: what is added to the blocks.
        keep_inputs: keep the inputs of every hop for a backward pass.
        lost: servers that failed during the pass, and when.
    """

    requester: HopRequester
    planner: RouteSource
    adapter: PackedAdapter = field(default_factory=PackedAdapter)
    keep_inputs: bool = True
    lost: dict[str, float] = field(default_factory=dict)

    def rerouter(self) -> Rerouter:
        """A rerouter for one micro-batch."""
        return Rerouter(self.planner, self.lost)


async def forward_batches(context: PassContext, span: Span, batches: Sequence[MicroBatch]) -> list[ForwardTrace]:
    """Run all micro-batches through the blocks of `span` at the same time; the traces are in their order.

    Raises:
        MissingBlocks: servers failed, and no other server offers their blocks.
        RemoteError: a server refused the request as wrong, or all servers that were tried failed.
    """
    for batch in batches:
        await batch.hidden.require_finite()
    # Later servers get the adapter while the first ones compute.
    later = {hop.server.peer_id: hop for batch in batches for hop in batch.route.hops[1:]}
    uploads = [
        asyncio.ensure_future(_upload_adapter(context, hop)) for hop in later.values() if context.adapter.keys(hop.span)
    ]
    try:
        return await gather_or_cancel([_forward(context, span, batch) for batch in batches])
    finally:
        await cancel_tasks(uploads)


async def _upload_adapter(context: PassContext, hop: Hop) -> None:
    with suppress(RemoteError):  # the first request to this server will meet the same error
        await context.requester.upload_adapter(hop, context.adapter)


async def _forward(context: PassContext, span: Span, batch: MicroBatch) -> ForwardTrace:
    inputs, outputs = await run_hops(context, context.rerouter(), span, batch.hidden, batch.layout, batch.route.hops)
    return ForwardTrace(batch.layout, tuple(inputs), outputs)


async def run_hops(
    context: PassContext,
    rerouter: Rerouter,
    span: Span,
    hidden: PackedHidden,
    layout: StepLayout,
    hops: Sequence[Hop],
    skip_last: bool = False,
) -> tuple[list[HopInputs], PackedHidden]:
    """Run one micro-batch through the blocks of `span`, and replace servers that fail.

    If two servers make NaN of the same inputs, the server that computed these inputs is replaced instead, once.

    Args:
        hops: the hops to begin with.
        skip_last: leave out the last hop, because only its inputs are needed.

    Returns:
        the inputs of every hop, and the outputs of the last hop that has run.
    """
    kept: list[HopInputs] = []
    before: HopInputs | None = None
    may_go_back = True
    while hops:
        rest = Span(hops[0].span.start, span.end)
        hop, *following = await rerouter.next_hops(hops, rest)
        if skip_last and not following:
            return [*kept, HopInputs(hop, hidden)], hidden
        try:
            slowness = context.planner.timeout_factor(hop.server.peer_id)
            outputs = await context.requester.forward(hop, hidden, layout, context.adapter, slowness)
        except RemoteError as error:
            try:
                hops = await rerouter.replace(hop, error, rest)
            except NotFiniteOutputs as agreed:  # rather the server before is to blame
                if before is None or not may_go_back:
                    raise
                hops = await rerouter.leave_suspect(before.hop, agreed, Span(before.hop.span.start, span.end))
                hidden, may_go_back = before.inputs, False
                del kept[-1:]
            continue
        rerouter.on_success(hop)
        before = HopInputs(hop, hidden)
        if context.keep_inputs:
            kept.append(before)
        hidden, hops = outputs, following
    return kept, hidden


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
