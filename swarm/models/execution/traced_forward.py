"""A span's forward over packed tokens without the family's modules: a list of torch calls, one function a block.

Most of a decode step of small blocks is Python: modules that call modules, hooks, attributes, arguments passed on
(about 0.3 ms a layer). `torch.export` runs the family's own code once and traces its operations, which are then called
one after the other. Two kinds of operations stay calls of ours: attention, which differs with every batch, and products
of frozen weights, which have a layout of their own.

Operations before the first block (rotary tables, say) become a function of the positions. Those of a block become a
function of the hidden states in front of it and of what the first function returned. So nothing has to be traced again
for sessions that use only some of the blocks, and a part takes no memory of its own.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

from swarm.models.attention.multi_session_attention import (
    ActiveBatch,
    AttentionExtras,
    PackedBatch,
    PackedMask,
    active_batch,
)
from swarm.models.weights.frozen_linear import FrozenLinear

TokenFill = Callable[[torch.Tensor, torch.Tensor, PackedBatch], None]
"""Stores in a batch the keys and values of hidden states `[tokens, 1, hidden]` at positions `[tokens, 1]`."""

# Only what tracing needs: which shape comes out.
_library = torch.library.Library("swarm", "DEF")
_library.define("attend(Tensor query, Tensor keys, Tensor values, Tensor? sinks, int width, int site) -> Tensor")
_library.define("multiply(Tensor inputs, int width, int site) -> Tensor")
_library.impl(
    "attend",
    lambda query, keys, values, sinks, width, site: query.new_empty(query.shape[0], 1, query.shape[1], width),
    "Meta",
)
_library.impl("multiply", lambda inputs, width, site: inputs.new_empty(*inputs.shape[:-1], width), "Meta")

_ATEN = torch.ops.aten
_DIRECT: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.cat.default: torch.cat,
    _ATEN.linear.default: functional.linear,
    _ATEN.silu.default: functional.silu,
    _ATEN.view.default: torch.Tensor.view,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
}
"""Shortcuts to the same functions: calling an overload by name costs a microsecond more."""


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


@dataclass(frozen=True)
class _AttentionSite:
    """One layer's cache and attention, as the family's code called them."""

    module: Any
    layer: int
    mask: PackedMask
    scale: float | None
    softcap: float | None

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        batch = active_batch()
        keys, _ = batch.update(keys, values, self.layer)
        return batch.attend(
            self.module, query, keys, width, self.mask, self.scale, AttentionExtras(self.softcap, sinks)
        )


class _TracingBatch(PackedBatch):
    """Stands for a batch while the forward is traced: remembers how each attention was called."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[_AttentionSite] = []
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
        self.sites.append(_AttentionSite(module, self._layer, mask, scale, extra.softcap))
        site = len(self.sites) - 1
        return cast(torch.Tensor, torch.ops.swarm.attend(query_NH1D, *self._new_kv, extra.sinks, width, site))


class TracedForward:
    """A forward `run(batch, hidden, positions)` of `model`, traced as a list of operations.

    Args:
        example: hidden states `[tokens, 1, hidden]` of at least two tokens.
        recorder: the batch with which it is traced; None for one that leaves attention to the batch of each call.

    Raises errors of torch's own if the forward cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[PackedBatch, torch.Tensor, torch.Tensor], Any],
        example: torch.Tensor,
        recorder: PackedBatch | None = None,
    ) -> None:
        batch = recorder if recorder is not None else _TracingBatch()  # an empty cache is false

        class Forward(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
                with ActiveBatch(batch):
                    return run(batch, hidden, positions)

        tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
        positions = torch.arange(len(example), device=example.device).unsqueeze(1)
        with torch.no_grad(), _warnings_silenced(), _products_as_calls(model) as products:
            self._program = torch.export.export(
                Forward(), (example, positions), dynamic_shapes=({0: tokens}, {0: tokens}), strict=False
            )
        self._model = model
        self._sites = batch.sites if isinstance(batch, _TracingBatch) else []
        self._products = products

    def flat(self, layers: nn.ModuleList) -> FlatForward:
        """The operations one after the other, with bound weights and without checks and conversions that do nothing.

        Args:
            layers: of the model, which become functions of their own.

        Raises `NotDivisible`.
        """
        module, bound = self._flattened()
        numbers = {layer: number for number, layer in enumerate(layers)}
        names = {f"model.{name}": numbers[one] for name, one in self._model.named_modules() if one in numbers}
        return divide(module.graph, bound, names)

    def flat_results(self) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """`flat` for a run that returns something else than hidden states: one function for all of it.

        Operations that occur several times with the same inputs are computed once.
        """
        module, bound = self._flattened()
        _share_operations(module.graph)
        module.recompile()
        forward: Callable[..., Any] = type(module).forward
        return partial(forward, None, *bound.values())

    def _flattened(self) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
        """The operations with weights, buffers and constants as placeholders, and what to pass for these."""
        module: Any = self._program.module(check_guards=False)
        graph = module.graph
        graph.set_codegen(fx.graph.CodeGen())
        first = next(node for node in graph.nodes if node.op == "placeholder")
        bound: dict[fx.Node, Any] = {}
        for node in list(graph.nodes):
            if node.op == "get_attr":
                with graph.inserting_before(first):
                    held = graph.placeholder(f"held_{len(bound)}")
                bound[held] = held.meta["val"] = operator.attrgetter(str(node.target))(module)
                node.replace_all_uses_with(held)
                graph.erase_node(node)
            elif node.op == "call_module" or node.target is _ATEN._assert_tensor_metadata.default:
                graph.erase_node(node)  # guards and checks of the example
            elif node.target is _ATEN.to.dtype and node.args[0].meta["val"].dtype is node.args[1]:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target is torch.ops.swarm.attend.default:
                *arguments, site = node.args
                node.target, node.args = self._sites[site].__call__, tuple(arguments)
            elif node.target is torch.ops.swarm.multiply.default:
                inputs, _, site = node.args
                node.target, node.args = self._products[site].product, (inputs,)
            elif node.target in _DIRECT:
                node.target = _DIRECT[node.target]
        graph.eliminate_dead_code()
        return module, bound


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


def _share_operations(graph: fx.Graph) -> None:
    """Replace operations by earlier ones that are the same, on the same inputs. None of them may change its inputs."""
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        known = first.setdefault(f"{id(node.target)} {node.args} {node.kwargs}", node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


@contextmanager
def _warnings_silenced() -> Iterator[None]:
    """Silence torch's warnings about its own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _products_as_calls(model: nn.Module) -> Iterator[list[FrozenLinear]]:
    """While the forward is traced, products of frozen weights are calls that are not traced into."""
    products = [module for module in model.modules() if isinstance(module, FrozenLinear)]

    def replaced(module: FrozenLinear, site: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda inputs: cast(torch.Tensor, torch.ops.swarm.multiply(inputs, module.out_features, site))

    for site, module in enumerate(products):
        module.forward = replaced(module, site)  # type: ignore[method-assign, assignment]
    try:
        yield products
    finally:
        for module in products:
            del module.forward
