"""Writing down what a forward calls of torch, as a graph of these calls for any number of tokens.

The forward runs twice, with different numbers of tokens, under a `TorchFunctionMode` that sees each call. A size in
which the two runs differ has to be a multiple of the number of tokens, and becomes one. (`torch.export` takes seconds
for this, and splits functions into smaller operations.) Whoever uses a trace compares its results with the forward's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

EXAMPLES = (2, 3)
"""Numbers of tokens of the two runs: few, as heads are large, and not one, with which code may do something else."""

_LOOKS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"}
)
"""Methods that tell what a tensor is like, not what is in it, besides attributes and `is_...`."""

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"})
"""Methods that change their tensor, besides those whose name ends with an underscore."""


class NotTraceable(Exception):
    """What the forward does cannot be written down as a list of calls: it looks into tensors, say."""


@dataclass(frozen=True)
class _Place:
    """A tensor in the arguments of an operation: the input or result with this number."""

    number: int


@dataclass(eq=False)
class _Operation:
    """A call of torch. In its arguments, `_Place`s stand for what this run has computed.

    Attributes:
        place: the number of its result.
        layer: in which block it was called; None if in none.
        width: the last size of its result; 0 if it has none.
        in_place: whether it changes the first of its arguments.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    place: _Place
    layer: int | None
    width: int
    in_place: bool = False


class Recorder(TorchFunctionMode):
    """Writes down what a forward calls of torch. A call that cannot be written down raises `NotTraceable`.

    Args:
        inputs: of the forward, which have the first places.

    Attributes:
        layer: which layer is running; the forward may tell.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.layer: int | None = None
        self._places: dict[int, _Place] = {}
        self._alive: list[torch.Tensor | None] = []  # an id is a tensor's own as long as it lives
        self._dependent: set[_Place] = set()
        """What is computed from the inputs, and not only as large as they are."""
        for tensor in inputs:
            self._dependent.add(self._place(tensor))

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._record(function, args, kwargs or {}, result)
        return result

    def call(self, function: Callable[..., Any], stand_in: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Write down a call of `function`, whose result looks like that of `stand_in`."""
        with torch._C.DisableTorchFunction():
            result = stand_in(*args)
        self._add(function, args, {}, result)
        return result

    def located(self, value: Any) -> Any:
        """`value` with the places of the tensors that this run has computed."""
        return map_aggregate(value, lambda one: cast(Any, self._places.get(id(one), one)))

    def _record(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any, result: Any) -> None:
        name = getattr(function, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            changed = args[0]
            if id(changed) not in self._places:
                raise NotTraceable(f"it changes a tensor that it has not made ({name})")
            self._add(_set_item if name == "__setitem__" else _public(function, name), args, kwargs, changed)
            self.operations[-1].in_place = True
        elif kwargs.get("out") is not None:
            raise NotTraceable(f"it writes results into tensors ({name})")
        elif isinstance(result, torch.Tensor):
            if any(result is one for one in args):
                return  # a conversion that had nothing to do
            if name == "__get__":  # an attribute such as mT
                function, args = getattr, (args[0], cast(Any, function).__self__.__name__)
            self._add(_public(function, name), args, kwargs, result)
        elif isinstance(result, tuple | list) and result and all(isinstance(one, torch.Tensor) for one in result):
            place = self._add(function, args, kwargs, None)
            for number, one in enumerate(result):
                self._append(operator.getitem, (place, number), {}, one)
        elif self._depend(self.located(args)) and not _asks_for_form(name):
            raise NotTraceable(f"it looks into a tensor ({name})")

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, result: torch.Tensor | None) -> _Place:
        return self._append(function, self.located(tuple(args)), self.located(kwargs), result)

    def _append(self, function: Callable[..., Any], args: Any, kwargs: Any, result: torch.Tensor | None) -> _Place:
        place = self._place(result)
        if self._depend((args, kwargs)):
            self._dependent.add(place)
        width = result.shape[-1] if result is not None and result.dim() else 0
        self.operations.append(_Operation(function, args, kwargs, place, self.layer, width))
        return place

    def _depend(self, arguments: Any) -> bool:
        """Whether any of the arguments is computed from the inputs."""
        found: list[Any] = []
        map_aggregate(arguments, found.append)
        return any(isinstance(one, _Place) and one in self._dependent for one in found)

    def _place(self, tensor: torch.Tensor | None) -> _Place:
        place = _Place(len(self._alive))
        self._alive.append(tensor)
        if tensor is not None:
            self._places[id(tensor)] = place
        return place


def _asks_for_form(name: str) -> bool:
    return name == "__get__" or name in _LOOKS or name.startswith("is_")


def _set_item(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    tensor[key] = value
    return tensor


def _public(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same as an operator, if it is one."""
    return cast(Callable[..., Any], getattr(operator, name, function)) if name.startswith("__") else function


@dataclass(frozen=True)
class Trace:
    """The calls of a forward.

    Attributes:
        graph: its placeholders are those of `bound`, then the inputs. The `meta` of a call's node has the number of its
            "layer", or None, the last size of its result as "width", and whether it changes its first argument as
            "in_place".
        bound: what is passed for the other placeholders: weights, buffers and constants.
    """

    graph: fx.Graph
    bound: Mapping[fx.Node, torch.Tensor]

    @property
    def changes_tensors(self) -> bool:
        """Whether a call changes one of its arguments."""
        return any(node.meta.get("in_place") for node in self.graph.nodes)

    def function(self, share: bool = False) -> Callable[..., Any]:
        """The forward as one function of its inputs.

        Args:
            share: whether what it calls several times with the same inputs is called once, unless it changes tensors.
        """
        if share and not self.changes_tensors:
            share_calls(self.graph)
        forward: Callable[..., Any] = type(fx.GraphModule(nn.Module(), self.graph)).forward
        return partial(forward, None, *self.bound.values())


def trace(forward: Callable[..., Any], make_inputs: Callable[[int], Sequence[torch.Tensor]]) -> Trace:
    """The calls of `forward(recorder, *inputs)`, of which the result needs.

    Args:
        make_inputs: tensors for a number of tokens, which is the first size of the first of them.

    Raises `NotTraceable`, and what the forward raises.
    """
    runs = []
    for tokens in EXAMPLES:
        inputs = make_inputs(tokens)
        recorder = Recorder(inputs)
        with torch.no_grad(), recorder:
            result = forward(recorder, *inputs)
        runs.append((recorder.operations, recorder.located(result)))
    return _unite(len(inputs), *runs)


def _unite(inputs: int, first: tuple[list[_Operation], Any], second: tuple[list[_Operation], Any]) -> Trace:
    """The calls of two runs, and their results, for any number of tokens. Raises `NotTraceable`."""
    graph = fx.Graph()
    graph.set_codegen(fx.graph.CodeGen())
    nodes = {number: graph.placeholder(f"input_{number}") for number in range(inputs)}
    tokens = graph.call_function(torch.Tensor.size, (nodes[0], 0))
    multiples = {1: tokens}
    bound: dict[int, tuple[fx.Node, torch.Tensor]] = {}

    def leaf(one: Any, other: Any) -> Any:
        if isinstance(one, _Place) and one == other:
            return nodes[one.number]
        if isinstance(one, torch.Tensor) and one is other:
            if id(one) not in bound:
                with graph.inserting_before(nodes[0]):
                    bound[id(one)] = graph.placeholder(f"held_{len(bound)}"), one
            return bound[id(one)][0]
        if isinstance(one, _Place | torch.Tensor) or type(one) is not type(other):
            raise NotTraceable("it computes with something else if there are more tokens")
        if one == other:
            return one
        factor = one // EXAMPLES[0] if isinstance(one, int) else 0
        if (one, other) != (factor * EXAMPLES[0], factor * EXAMPLES[1]):
            raise NotTraceable(f"{one} of {EXAMPLES[0]} tokens are {other} of {EXAMPLES[1]}")
        if factor not in multiples:
            with graph.inserting_after(tokens):
                multiples[factor] = graph.call_function(operator.mul, (tokens, factor))
        return multiples[factor]

    def unite(one: Any, other: Any) -> Any:
        others: list[Any] = []
        map_aggregate(other, others.append)
        others.reverse()
        return map_aggregate(one, lambda value: leaf(value, others.pop()))

    (operations, result), (others, other_result) = first, second
    if [_called(one) for one in operations] != [_called(other) for other in others]:
        raise NotTraceable("it does something else if there are more tokens")
    for one, other in zip(operations, others, strict=True):
        arguments, keywords = unite(one.args, other.args), unite(one.kwargs, other.kwargs)
        nodes[one.place.number] = node = graph.call_function(one.function, arguments, keywords)
        node.meta.update(layer=one.layer, width=one.width, in_place=one.in_place)
    graph.output(unite(result, other_result))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return Trace(graph, dict(bound.values()))


def share_calls(graph: fx.Graph) -> None:
    """Replace calls by earlier ones that are the same, on the same inputs. None of them may change its inputs."""
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        known = first.setdefault(f"{id(node.target)} {node.args} {node.kwargs}", node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _called(operation: _Operation) -> Any:
    """What is called. The two runs may call the same method of different objects."""
    return getattr(operation.function, "__func__", operation.function)
