"""A span's forward over packed tokens without the family's modules: a list of torch calls, one function a block.

Most of a decode step of small blocks is Python: modules that call modules, hooks, attributes, arguments passed on
(about 0.3 ms a layer). So the calls of torch that the family's own code makes are written down (`tracing`), and then
made one after the other. Attention stays a call of ours, because it differs with every batch.

Operations before the first block (rotary tables, say) become a function of the positions. Those of a block become a
function of the hidden states in front of it and of what the first function returned. So nothing has to be traced again
for sessions that use only some of the blocks, and a part takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from swarm.models.attention.multi_session_attention import (
    ActiveBatch,
    AttentionExtras,
    AttentionSite,
    PackedBatch,
    PackedMask,
)
from swarm.models.execution.fewer_calls import with_fewer_calls
from swarm.models.tracing import NotTraceable, Recorder, Trace, trace

if TYPE_CHECKING:
    from swarm.models.execution.span_model import SpanModel

TokenFill = Callable[[torch.Tensor, torch.Tensor, PackedBatch], None]
"""Stores in a batch the keys and values of hidden states `[tokens, 1, hidden]` at positions `[tokens, 1]`."""


class NotDivisible(NotTraceable):
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


class _TracingBatch(PackedBatch):
    """Stands for a batch while the forward is traced: writes down how each attention was called."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._layer = 0
        self._new_kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer, self._new_kv = layer_idx, (key_states, value_states)
        return key_states, value_states

    def attend(
        self,
        module: Any,
        query_NH1D: torch.Tensor,
        keys: torch.Tensor | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        assert self._new_kv is not None
        site = AttentionSite(module, self._layer, mask, scale, extra.softcap)
        inputs = (query_NH1D, *self._new_kv, extra.sinks, width)
        return self._recorder.call(site.attend, _shape_of_attention, *inputs)


def _shape_of_attention(query: torch.Tensor, keys: Any, values: Any, sinks: Any, width: int) -> torch.Tensor:
    return query.new_zeros(query.shape[0], 1, query.shape[1], width)


def trace_span(
    model: SpanModel,
    run: Callable[[PackedBatch, torch.Tensor, torch.Tensor], Any] | None = None,
    batch: PackedBatch | None = None,
) -> Trace:
    """The calls of a forward of packed tokens.

    Args:
        run: the forward of a batch, hidden states `[tokens, 1, hidden]` and positions `[tokens, 1]`; None for the
            model's own, which leaves attention to the batch of each call.
        batch: what it is traced with, if it is another.

    Raises `NotTraceable`, and what the forward raises.
    """

    def make_inputs(tokens: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden_N1H = torch.randn(tokens, 1, model.hidden_size, generator=generator).to(model.device, model.dtype)
        return hidden_N1H, torch.arange(tokens, device=model.device).unsqueeze(1)

    def forward(recorder: Recorder, hidden_N1H: torch.Tensor, positions_N1: torch.Tensor) -> Any:
        traced = batch if batch is not None else _TracingBatch(recorder)  # an empty cache is false
        with _numbered(model.layers, recorder), ActiveBatch(traced):
            return (run or model.run_modules)(traced, hidden_N1H, positions_N1)

    return trace(forward, make_inputs)


def flat_forward(model: SpanModel) -> FlatForward:
    """The model's forward as a function for each of its blocks. Raises `NotTraceable`, and what the forward raises."""
    return divide(with_fewer_calls(trace_span(model)), len(model.layers))


def divide(trace: Trace, layers: int) -> FlatForward:
    """One function for each block of a traced forward of hidden states and positions, which returns hidden states.

    Raises `NotDivisible`.
    """
    graph, bound = trace.graph, trace.bound
    hidden, positions = [node for node in graph.nodes if node.op == "placeholder" and node not in bound]
    (result,) = graph.output_node().all_input_nodes
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    numbers: dict[fx.Node, int | None] = {node: node.meta.get("layer") for node in nodes}
    before = _shared_nodes(nodes, numbers, {*bound, positions}, hidden, result)
    blocks: list[list[fx.Node]] = [[] for _ in range(layers)]
    for node, number in numbers.items():
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
        sized = node.target is torch.Tensor.size and node.args[0] is hidden
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


@contextmanager
def _numbered(layers: nn.ModuleList, recorder: Recorder) -> Iterator[None]:
    """Meanwhile, the recorder knows in which of the layers it is."""

    def enter(number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, *_: Any) -> None:
            recorder.layer = number
            handles.append(layer.register_forward_hook(leave))  # behind the other hooks, which belong to the layer

        return hook

    def leave(*_: Any) -> None:
        recorder.layer = None

    handles = [layer.register_forward_pre_hook(enter(number)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
