"""Batches without a session: whole sequences through the blocks, in micro-batches that go several ways at once.

They are divided among routes by throughput, so that all should come back at about the same time (SWARM parallelism,
Ryabinin et al. 2023), and each route's part into micro-batches, so that its servers work at the same time. Where a
server fails, the micro-batches that it had are sent again from the block where they were lost.
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
from swarm.errors import RemoteError

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences and the route that they should take."""

    hidden: PackedHidden
    layout: StepLayout
    route: Route


@dataclass(frozen=True)
class HopInputs:
    """What went into the blocks of one hop."""

    hop: Hop
    inputs: PackedHidden


@dataclass(frozen=True)
class ForwardTrace:
    """The way that a micro-batch took, from which its backward pass begins.

    Attributes:
        legs: its hops; they cover the blocks in order. None if they were not kept.
        outputs: of the last one.
    """

    layout: StepLayout
    legs: tuple[HopInputs, ...]
    outputs: PackedHidden


@dataclass
class PassContext:
    """One forward or backward pass of a batch.

    Attributes:
        adapter: what is added to the blocks.
        keeps: whether a way back may follow: then what went into each hop is kept.
        lost: servers that failed meanwhile, and when.
    """

    asker: HopRequester
    planner: RouteSource
    adapter: PackedAdapter = field(default_factory=PackedAdapter)
    keeps: bool = True
    lost: dict[str, float] = field(default_factory=dict)

    def detours(self) -> Rerouter:
        """For one micro-batch."""
        return Rerouter(self.planner, self.lost)


async def forward_batches(work: PassContext, span: Span, batches: Sequence[MicroBatch]) -> list[ForwardTrace]:
    """All micro-batches through the blocks of `span`, at the same time; in their order.

    Raises:
        MissingBlocks: servers failed, and nobody else holds their blocks.
        RemoteError: a server refused the request as wrong, or all that were tried failed.
    """
    for batch in batches:
        batch.hidden.check()
    # Servers behind the first ones get the adapter while those compute.
    later = {hop.server.peer_id: hop for batch in batches for hop in batch.route.hops[1:]}
    bringing = [asyncio.ensure_future(_bring(work, hop)) for hop in later.values() if work.adapter.keys(hop.span)]
    try:
        return await gather_or_cancel([_forward(work, span, batch) for batch in batches])
    finally:
        await cancel_tasks(bringing)


async def _bring(work: PassContext, hop: Hop) -> None:
    with suppress(RemoteError):  # whoever needs it there will see
        await work.asker.bring(hop, work.adapter)


async def _forward(work: PassContext, span: Span, batch: MicroBatch) -> ForwardTrace:
    legs, outputs = await run_hops(work, work.detours(), span, batch.hidden, batch.layout, batch.route.hops)
    return ForwardTrace(batch.layout, tuple(legs), outputs)


async def run_hops(
    work: PassContext,
    detours: Rerouter,
    span: Span,
    hidden: PackedHidden,
    layout: StepLayout,
    hops: Sequence[Hop],
    whole: bool = True,
) -> tuple[list[HopInputs], PackedHidden]:
    """One micro-batch through the blocks of `span`, whatever happens to the servers.

    Args:
        whole: False to leave out the last hop: its inputs are wanted, not its outputs.

    Returns:
        the way that it took, and what came out of it.
    """
    legs: list[HopInputs] = []
    while hops:
        rest = Span(hops[0].span.start, span.end)
        hop, *behind = await detours.begin(hops, rest)
        if not behind and not whole:
            return [*legs, HopInputs(hop, hidden)], hidden
        try:
            slowness = work.planner.timeout_factor(hop.server.peer_id)
            outputs = await work.asker.forward(hop, hidden, layout, work.adapter, slowness)
        except RemoteError as error:
            hops = await detours.after(hop, error, rest)
            continue
        work.planner.report_success(hop.server.peer_id)
        if work.keeps:
            legs.append(HopInputs(hop, hidden))
        hidden, hops = outputs, behind
    return legs, hidden


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. When one fails the others are broken off."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """End tasks that are not wanted any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
