"""A span's forward over packed tokens without the family's modules: a flat list of torch calls, or compiled code.

Most of a decode step of small blocks is Python: modules that call modules, hooks, attributes, arguments passed on
(about 0.3 ms a layer). `torch.export` runs the family's own code once and traces its operations. `flat` calls these one
after the other; `compiled` lets AOTInductor turn them into machine code. That takes half a minute and a C++ compiler,
but only once: the result is kept on disk.

Two kinds of operations stay calls of ours: attention, which differs with every batch, and products of frozen weights,
which have a layout of their own.
"""

from __future__ import annotations

import hashlib
import operator
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from swarm.models.execution.tracing.flat_forward import FlatForward, divide
from swarm.models.weights.frozen_linear import FrozenLinear

TokenForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states `[tokens, 1, hidden]` and positions `[tokens, 1]` to outputs, shaped like the hidden states."""

TokenFill = Callable[[torch.Tensor, torch.Tensor, PackedBatch], None]
"""Stores in a batch the keys and values of hidden states `[tokens, 1, hidden]` at positions `[tokens, 1]`."""

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


_running = threading.local()
"""The trace whose compiled code this thread runs, so that its calls find the modules that they stand for."""


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, width: int, site: int
) -> torch.Tensor:
    return cast(torch.Tensor, _running.trace.sites[site](query, keys, values, sinks, width))


def _multiply(inputs: torch.Tensor, width: int, site: int) -> torch.Tensor:
    return cast(torch.Tensor, _running.trace.products[site].product(inputs))


for _device in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _device)
    _library.impl("multiply", _multiply, _device)


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
        self.sites = batch.sites if isinstance(batch, _TracingBatch) else []
        self.products = products

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
                node.target, node.args = self.sites[site].__call__, tuple(arguments)
            elif node.target is torch.ops.swarm.multiply.default:
                inputs, _, site = node.args
                node.target, node.args = self.products[site].product, (inputs,)
            elif node.target in _DIRECT:
                node.target = _DIRECT[node.target]
        graph.eliminate_dead_code()
        return module, bound

    def compiled(self, folder: Path) -> TokenForward:
        """Machine code from `folder`, compiled and saved there if it is missing. It shares the model's weights."""
        path = folder / f"{self._fingerprint()}.pt2"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _warnings_silenced(), tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = torch._inductor.aoti_compile_and_package(
                    self._program,
                    package_path=os.path.join(temporary, path.name),
                    inductor_configs={"aot_inductor.package_constants_in_so": False},
                )
                os.replace(made, path)
        package: Any = torch._inductor.aoti_load_package(str(path))
        weights = {**self._program.state_dict, **self._program.constants}
        constants = {name: weights[name] for name in package.get_constant_fqns()}
        package.load_constants(constants, check_full_update=True, user_managed=True)

        def function(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            _running.trace = self
            return _single_output(package(hidden, positions))

        return function

    def _fingerprint(self) -> str:
        """What the compiled code depends on: operations, shapes, versions, this kind of processor."""
        shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in self._program.state_dict.items()]
        parts = (str(self._program.graph), shapes, torch.__version__, torch.backends.cpu.get_cpu_capability())
        return hashlib.sha256(repr((parts, _processor_flags())).encode()).hexdigest()[:32]


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


def _single_output(result: Any) -> torch.Tensor:
    return cast(torch.Tensor, result[0] if isinstance(result, (tuple, list)) else result)


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


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
