"""The way back of a batch: gradients through the servers in reverse order, from inputs that were kept on the way there.

Servers keep nothing between the two passes, so any server of the same blocks can do a hop's part. Where one fails its
blocks are routed anew. If several servers are needed for them, the inputs of the inner ones are computed again first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.client.batches.forward_pass import ForwardTrace, PassContext, gather_or_cancel, run_hops
from swarm.client.batches.gradient_packing import HopGradients
from swarm.errors import RemoteError


async def backward_batches(
    work: PassContext, passages: Sequence[ForwardTrace], gradients: Sequence[torch.Tensor], first: int
) -> list[HopGradients]:
    """The gradients of what went in and of the adapter, one for each passage, in their order.

    Args:
        passages: of a forward pass with the same adapter.
        gradients: of their outputs, `[tokens, hidden_size]` float32 on the CPU, finite.
        first: blocks before this one need no gradients; those of the inputs then have no meaning.

    Raises as `forward_all` does.
    """
    pairs = zip(passages, gradients, strict=True)
    return await gather_or_cancel([_backward(work, passage, gradient, first) for passage, gradient in pairs])


async def _backward(work: PassContext, passage: ForwardTrace, gradient_TH: torch.Tensor, first: int) -> HopGradients:
    """One micro-batch, whatever happens to the servers."""
    layout, detours = passage.layout, work.detours()
    legs, parts = list(passage.legs), dict[int, Sequence[torch.Tensor]]()
    while legs and legs[-1].hop.span.end > first and bool(gradient_TH.any()):
        leg = legs.pop()
        span = leg.hop.span
        hops = await detours.begin([leg.hop], span)
        if len(hops) == 1:
            hop = hops[0]
            slowness = work.planner.timeout_factor(hop.server.peer_id)
            try:
                found = await work.asker.backward(hop, leg.inputs, gradient_TH, layout, work.adapter, slowness)
            except RemoteError as error:
                hops = await detours.after(hop, error, span)
            else:
                work.planner.report_success(hop.server.peer_id)
                gradient_TH, parts = found.inputs, {**parts, **found.parts}
                continue
        legs += (await run_hops(work, detours, span, leg.inputs, layout, hops, whole=False))[0]
    return HopGradients(gradient_TH, parts)
