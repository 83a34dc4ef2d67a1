"""Forward and backward passes of a batch without a session, in micro-batches that take several routes at once.

The batch is divided among routes by their throughput, so that all parts should finish at about the same time (SWARM
parallelism, Ryabinin et al. 2023). Each route's part is divided into micro-batches, so that its servers work at the
same time. When a server fails, its micro-batches are sent again, from the block where they were lost.

The backward pass takes the gradients through the servers in reverse order. It begins with the inputs of every hop,
which the client kept in the forward pass. Servers keep nothing between the two passes, so any server that has a hop's
blocks can compute its gradients. If several servers are needed to replace one, the inputs of the inner ones are
computed again first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from swarm.client.batches.hop_requests import HopGradients, HopRequester
from swarm.client.chain.prompt_chunks import chunk_count, chunk_overhead
from swarm.client.routes.route_source import (
    MIN_ROUTES_TRIED,
    MissingBlocksWait,
    RouteSource,
    is_worth_another_server,
    not_finite,
)
from swarm.client.wire.adapter_upload import PackedAdapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Hop, Route, ServerInfo, Span, StepLayout
from swarm.errors import CacheFull, MissingBlocks, NotFiniteOutputs, RemoteError, SuspectOutputs

logger = logging.getLogger(__name__)

T = TypeVar("T")


def split_into_micro_batches(
    counts: Sequence[int], servers: Sequence[ServerInfo], gradients: float = 0.0
) -> list[range]:
    """The sequences of each micro-batch, ascending; all micro-batches hold about as many tokens.

    Args:
        counts: tokens of each sequence, >= 1.
        servers: the servers of the route.
        gradients: values in the gradients of one block's adapter, divided by `hidden_size`. They are sent back once for
            each micro-batch, whatever its size.
    """
    if not counts:
        return []
    total = sum(counts)
    cost = chunk_overhead(servers) + _gradient_cost(servers, gradients)
    size = total / chunk_count(total, len(servers), cost)
    middles = [end - count / 2 for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    groups = itertools.groupby(range(len(counts)), key=lambda index: int(middles[index] / size))
    sequences = [list(group) for _, group in groups]
    return [range(group[0], group[-1] + 1) for group in sequences]


def _gradient_cost(servers: Sequence[ServerInfo], gradients: float) -> float:
    """The cost of sending adapter gradients over the slowest link, in tokens that a server computes meanwhile.

    0 if no link has been measured.
    """
    if not gradients:
        return 0.0
    measured = [server for server in servers if server.network_throughput and server.forward_throughput]
    return gradients * max((server.forward_throughput / server.network_throughput for server in measured), default=0.0)


class Rerouter:
    """Finds other servers for one micro-batch.

    Args:
        planner: finds routes and remembers which servers failed.
        lost: servers that failed a micro-batch of the pass, and when; shared by all its micro-batches.
    """

    def __init__(self, planner: RouteSource, lost: dict[str, float]) -> None:
        self._planner = planner
        self._lost = lost
        self._tries = 0
        self._waiting = MissingBlocksWait(planner)
        self._requested_at = 0.0
        self._refuser: tuple[Hop, RemoteError] | None = None
        """Who refused what every server would refuse, it says, or made NaN of its inputs. Another one is asked now."""

    async def next_hops(self, hops: Sequence[Hop], span: Span) -> list[Hop]:
        """The hops over `span`, whose first one gets a request now: `hops`, or others if its server has been lost."""
        usable = list(hops) if hops[0].server.peer_id not in self._lost else await self.find_hops(span)
        self._requested_at = time.perf_counter()
        return usable

    async def replace(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """New hops over `span`, which begins with the hop that failed.

        Raises:
            RemoteError: `error`, if no other server would do better, or if enough servers were tried.
            MissingBlocks: no server offers the blocks.
        """
        if isinstance(error, NotFiniteOutputs):
            error = not_finite(hop)
        if not is_worth_another_server(error) or isinstance(error, NotFiniteOutputs):
            return await self._second_opinion(hop, error, span)
        peer_id = hop.server.peer_id
        if self._requested_at >= self._lost.get(peer_id, -math.inf):
            self._lost[peer_id] = time.perf_counter()
            self._planner.report_failure(peer_id, error)
            logger.info("%s; trying another server", error)
        self._tries += 1
        is_last_try = self._tries >= MIN_ROUTES_TRIED and self._waiting.is_over(error)
        try:
            hops = await self.find_hops(span)
        except MissingBlocks:
            if isinstance(error, CacheFull):  # the blocks are there
                raise error from None
            raise
        if is_last_try:
            raise error
        return hops

    def on_success(self, hop: Hop) -> None:
        """A server did what was asked. If another one refused that before, it alone thinks so."""
        self._planner.report_success(hop.server.peer_id)
        if self._refuser is not None and hop.span.end >= self._refuser[0].span.end:
            refuser, error = self._refuser
            self._refuser = None
            self._report(refuser, error)

    async def leave_suspect(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """Hops over `span` without the server of `hop`, from whose outputs two others made NaN. Raises `error` if there
        are none."""
        self._refuser = None
        hops = await self._hops_without(hop, error, span)
        self._report(hop, SuspectOutputs(f"{describe_hop(hop)} answered with outputs from which others made NaN"))
        return hops

    async def _second_opinion(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """Hops that do without a server that refused. Raises its error if they agree, or if there are none."""
        peer_id = hop.server.peer_id
        if self._refuser is not None and self._refuser[0].server.peer_id != peer_id:
            raise error
        self._refuser = hop, error
        return await self._hops_without(hop, error, span)

    async def _hops_without(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        try:
            route = await self._planner.route(span, None, None, 0, frozenset({hop.server.peer_id}))
        except MissingBlocks:
            raise error from None
        return list(route.hops)

    def _report(self, hop: Hop, error: RemoteError) -> None:
        """Report a server, unless another micro-batch of the pass has done so."""
        if hop.server.peer_id not in self._lost:
            self._lost[hop.server.peer_id] = time.perf_counter()
            self._planner.report_failure(hop.server.peer_id, error)
            logger.info("%s; using other servers", error)

    async def find_hops(self, span: Span) -> list[Hop]:
        """Hops over `span`. Waits for servers of missing blocks as a session does, then raises `MissingBlocks`."""
        route = await self._waiting.retry(lambda: self._planner.route(span, None, None, 0))
        return list(route.hops)


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


async def backward_batches(
    context: PassContext, traces: Sequence[ForwardTrace], gradients: Sequence[torch.Tensor], first: int
) -> list[HopGradients]:
    """The gradients of the inputs and of the adapter, one for each trace, in their order.

    Args:
        traces: of a forward pass with the same adapter.
        gradients: of the traces' outputs, `[tokens, hidden_size]`, float32, on the CPU, finite.
        first: blocks before this one need no gradients; the gradient of the inputs is then meaningless.

    Raises as `forward_batches` does.
    """
    pairs = zip(traces, gradients, strict=True)
    return await gather_or_cancel([_backward(context, trace, gradient, first) for trace, gradient in pairs])


async def _backward(context: PassContext, trace: ForwardTrace, gradient_TH: torch.Tensor, first: int) -> HopGradients:
    """The backward pass of one micro-batch; servers that fail are replaced."""
    layout, rerouter = trace.layout, context.rerouter()
    remaining, parts = list(trace.hop_inputs), dict[int, Sequence[torch.Tensor]]()
    while remaining and remaining[-1].hop.span.end > first and bool(gradient_TH.any()):
        last = remaining.pop()
        span = last.hop.span
        hops = await rerouter.next_hops([last.hop], span)
        if len(hops) == 1:
            hop = hops[0]
            slowness = context.planner.timeout_factor(hop.server.peer_id)
            try:
                found = await context.requester.backward(
                    hop, last.inputs, gradient_TH, layout, context.adapter, slowness
                )
            except RemoteError as error:
                hops = await rerouter.replace(hop, error, span)
            else:
                rerouter.on_success(hop)
                gradient_TH, parts = found.inputs, {**parts, **found.parts}
                continue
        remaining += (await run_hops(context, rerouter, span, last.inputs, layout, hops, skip_last=True))[0]
    return HopGradients(gradient_TH, parts)
