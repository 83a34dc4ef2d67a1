"""A traced forward as one function for each block, so that any part of the blocks is as quick as all of them.

A trace is a list of operations. Those before the first block (rotary tables, say) become a function of the positions.
Those of a block become a function of the hidden states in front of it and of what the first function returned. So
nothing has to be traced again for sessions that use only some of the blocks, and a part takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn


class NotDivisible(Exception):
    """The blocks of a trace exchange more than hidden states, or the model does something between them."""


@dataclass(frozen=True, eq=False)
class FlatForward:
    """Some blocks as functions.

    Attributes:
        prelude: hidden states `[tokens, 1, hidden]` and positions `[tokens, 1]` to what the blocks share, which depends
            on positions only; of the hidden states it looks at the shape.
        blocks: each takes what they share, then the hidden states in front of it, and returns those behind it.
    """

    prelude: Callable[[torch.Tensor, torch.Tensor], Sequence[Any]]
    blocks: tuple[Callable[..., torch.Tensor], ...]

    def __call__(self, hidden_N1H: torch.Tensor, positions_N1: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the last block, shaped like those in front of the first."""
        shared = self.prelude(hidden_N1H, positions_N1)
        for block in self.blocks:
            hidden_N1H = block(*shared, hidden_N1H)
        return hidden_N1H

    def narrowed(self, start: int, end: int) -> FlatForward:
        """Only the blocks [start, end) of these."""
        return FlatForward(self.prelude, self.blocks[start:end])


def divide(graph: fx.Graph, bound: Mapping[fx.Node, Any], layer_names: Mapping[str, int]) -> FlatForward:
    """One function for each block of a traced forward.

    Args:
        graph: its placeholders are those of `bound`, then hidden states and positions. It returns hidden states.
        bound: what is passed for the other placeholders: weights, buffers and constants.
        layer_names: of the modules that are blocks, to their numbers.

    Raises `NotDivisible`.
    """
    hidden, positions = [node for node in graph.nodes if node.op == "placeholder" and node not in bound]
    (result,) = graph.output_node().all_input_nodes
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    layers = {node: _layer_number(node, layer_names) for node in nodes}
    before = _shared_nodes(nodes, layers, {*bound, positions}, hidden, result)
    blocks: list[list[fx.Node]] = [[] for _ in layer_names]
    for node, number in layers.items():
        if number is not None and node not in before:
            blocks[number].append(node)
    known = {*bound, positions, *before}
    shared = [node for node in (positions, *before) if any(user not in before for user in node.users)]
    functions, incoming = [], hidden
    for number, own in enumerate(blocks):
        following = result if number + 1 == len(blocks) else _handed_over(own)
        allowed = {*known, incoming, *own}
        for node in own:
            if not allowed.issuperset(node.all_input_nodes):
                raise NotDivisible(f"{node.name} uses what another block than the one before has computed")
        functions.append(_function(own, (*shared, incoming), following, bound))
        incoming = following
    return FlatForward(_function([*before], (hidden, positions), shared, bound), tuple(functions))


def _layer_number(node: fx.Node, layer_names: Mapping[str, int]) -> int | None:
    """In which block the operation was traced; None if in none."""
    stack: Iterable[tuple[str, Any]] = node.meta.get("nn_module_stack", {}).values()
    return next((layer_names[name] for name, _ in stack if name in layer_names), None)


def _shared_nodes(
    nodes: Sequence[fx.Node],
    layers: Mapping[fx.Node, int | None],
    known: set[fx.Node],
    hidden: fx.Node,
    result: fx.Node,
) -> dict[fx.Node, None]:
    """What has to be computed before the first block, in order: what does not depend on hidden states, and is outside
    of the blocks or used by several of them."""
    needed, independent = _with_inputs([result]), set(known)
    shared: list[fx.Node] = []
    for node in nodes:
        own = layers[node]
        sized = node.target is torch.ops.aten.sym_size.int and node.args[0] is hidden
        if sized or independent.issuperset(node.all_input_nodes):
            independent.add(node)
            if own is None or any(layers.get(user) not in (own, None) for user in node.users):
                shared.append(node)
        elif own is None and node in needed:
            raise NotDivisible(f"{node.name} is computed outside of the blocks, from hidden states")
    # What is computed with the inputs before the first block comes to nothing: received hidden states replace it.
    chosen = _with_inputs([node for node in shared if node in needed])
    return {node: None for node in nodes if node in chosen}


def _with_inputs(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _handed_over(own: Sequence[fx.Node]) -> fx.Node:
    """The only result of a block that others use."""
    nodes = set(own)
    used = [node for node in own if any(user not in nodes for user in node.users)]
    if len(used) != 1:
        raise NotDivisible(f"a block hands over {', '.join(node.name for node in used) or 'nothing'}")
    return used[0]


def _function(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    result: fx.Node | Sequence[fx.Node],
    bound: Mapping[fx.Node, Any],
) -> Callable[..., Any]:
    """What the nodes compute, as a function of `inputs`."""
    used = {one for node in nodes for one in node.all_input_nodes}
    held = [node for node in bound if node in used]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (*held, *inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result] if isinstance(result, fx.Node) else tuple(copies[node] for node in result))
    graph.set_codegen(fx.graph.CodeGen())
    forward: Callable[..., Any] = type(fx.GraphModule(nn.Module(), graph)).forward
    return partial(forward, None, *[bound[node] for node in held])
