"""Fewer calls of torch for the same numbers, bit for bit, in a traced forward.

Between two products of a decode step everything but their weights has left the processor's cache, so that a call takes
five times as long as in a loop. How many calls there are counts, not how much they compute.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from swarm.models.tracing import Trace, share_calls


def with_fewer_calls(trace: Trace) -> Trace:
    """The same forward; it is the trace itself that changes. One that changes tensors stays as it is."""
    graph = trace.graph
    if trace.changes_tensors:
        return trace
    for node in list(graph.nodes):
        if node.target is torch.Tensor.pow and node.args[1:] == (2,):
            node.target, node.args = torch.Tensor.mul, (node.args[0], node.args[0])
        elif (turned := _turned_halves(node)) is not None:
            _turn_at_once(node, turned)
    share_calls(graph)  # what every layer computes from positions
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return trace


def _turned_halves(product: Any) -> Any:
    """The node of `x` in `cat((-x[..., half:], x[..., :half]), dim=-1) * factor`, of which rotary embeddings consist.

    None if the node is another call.
    """
    if product.target is not torch.Tensor.mul or not all(isinstance(one, fx.Node) for one in product.args):
        return None
    joined = product.args[0]
    if joined.target is not torch.cat or joined.kwargs != {"dim": -1} or len(joined.args[0]) != 2:
        return None
    negative, first = joined.args[0]
    if negative.target is not torch.Tensor.neg or first.target is not operator.getitem:
        return None
    second, x = negative.args[0], first.args[0]
    if second.target is not operator.getitem or second.args[0] is not x:
        return None
    half = x.meta.get("width", 0) // 2
    halves = (..., slice(None, half, None)), (..., slice(half, None, None))
    return x if (first.args[1], second.args[1]) == halves and x.meta["width"] == 2 * half else None


def _turn_at_once(product: Any, x: Any) -> None:
    """Give the sign to the factor, which all layers share, so that `x` is only rolled."""
    graph, factor, half = product.graph, product.args[1], x.meta["width"] // 2
    with graph.inserting_before(product):
        rolled = graph.call_function(torch.roll, (x, half, -1))
        signed = graph.call_function(_negate_first, (factor, half))
    rolled.meta.update(product.meta)
    signed.meta.update(factor.meta)
    product.args = (rolled, signed)


def _negate_first(factor: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((-factor[..., :half], factor[..., half:]), dim=-1)
