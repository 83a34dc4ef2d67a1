"""Backward pass of a batch without a session: gradients go through the servers in reverse order.

It begins with the inputs of every hop, which the client kept in the forward pass. Servers keep nothing between the two
passes, so any server that has a hop's blocks can compute its gradients. When a server fails, a new route is found for
its blocks. If several servers are needed for them, the inputs of the inner ones are computed again first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.client.batches.forward_pass import ForwardTrace, PassContext, gather_or_cancel, run_hops
from swarm.client.batches.gradient_packing import HopGradients
from swarm.errors import RemoteError


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
