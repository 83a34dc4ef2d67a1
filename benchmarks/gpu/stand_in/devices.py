"""Tensors of the processor that say they are on a card, and refuse what a card would refuse.

A tensor is on the card if it was moved or made there, or if it was computed from one that is. That is an attribute of
the Python object, which every torch function passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CARD = torch.device("cuda", 0)
_MARK = "_on_stand_in_card"
_CPU = torch.device("cpu")

_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]

READS_TO_HOST = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"})
MAKES_FROM_HOST = frozenset({"tensor", "as_tensor"})
MIXES = frozenset(
    {"_has_compatible_shallow_copy_type", "copy_", "__set__", "__getitem__", "__setitem__", "set_", "type_as", "index"}
)
"""Functions that take operands of the host beside some of the card."""

CHANGES_NO_DEVICE = frozenset({"copy_", "__setitem__", "set_"})
"""Functions that return what they change, which stays where it is."""

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
_TO = torch.Tensor.to


def is_on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it is on the card."""
    return getattr(tensor, _MARK, False)


def _is_card(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


class CardMode(TorchFunctionMode):
    """While it is active in a thread, that thread's tensors can be on the card.

    Args:
        capturing: whether a graph is being captured, when nothing may travel between the host and the card.
    """

    def __init__(self, capturing: Callable[[], bool]) -> None:
        super().__init__()
        self._capturing = capturing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE:
            return CARD if is_on_card(args[0]) else func(*args)
        if func == _IS_CUDA:
            return is_on_card(args[0])
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        if name == "_parse_to":  # says where to, and moves nothing
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs)
        operands = [*_tensors(args), *_tensors(kwargs)]
        on_card = [one for one in operands if is_on_card(one)]
        target = next((one for one in (*args, *kwargs.values()) if _is_device(one)), None)
        self._check(name, operands, on_card, target)
        if name == "histc" and not args[0].is_floating_point():  # a card counts integers, too
            args = (args[0].float(), *args[1:])
        result = func(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
        if name == "__set__" and len(args) == 2 and isinstance(args[1], torch.Tensor):  # `parameter.data = ...`
            setattr(args[0], _MARK, is_on_card(args[1]))
        elif name not in CHANGES_NO_DEVICE:
            there = _is_card(target) if target is not None else bool(on_card)
            for one in _tensors(result):
                setattr(one, _MARK, there and _DEVICE(one).type == "cpu")
        return result

    def _move(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`to`, `cpu` and `cuda`. What arrives is another tensor, as it would be."""
        source = args[0]
        others = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.Tensor)]
        target = next((one for one in (*args[1:], *kwargs.values()) if _is_device(one)), None)
        if name != "to":
            target = CARD if name == "cuda" else _CPU
        elif others:
            target = CARD if is_on_card(others[0]) else _DEVICE(others[0])
        there = is_on_card(source) if target is None else _is_card(target)
        if there != is_on_card(source) and self._capturing():
            raise RuntimeError(f"{NOT_PERMITTED} ({name})")
        if name == "cuda":
            result = _TO(source, _CPU)
        else:
            result = func(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
        if result is source and there != is_on_card(source):
            result = source.clone()
        setattr(result, _MARK, there and _DEVICE(result).type == "cpu")
        return result

    def _check(self, name: str, operands: list[torch.Tensor], on_card: list[torch.Tensor], target: object) -> None:
        if on_card and len(on_card) < len(operands) and name not in MIXES and "backward" not in name:
            foreign = [one for one in operands if not is_on_card(one) and one.dim() and one.device.type == "cpu"]
            if foreign:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                    f"(in {name}: {[tuple(one.shape) for one in operands]})"
                )
        if not self._capturing():
            return
        leaves = bool(on_card) and name in READS_TO_HOST
        arrives = _is_card(target) and name in MAKES_FROM_HOST
        copied = name == "copy_" and len(on_card) == 1 and len(operands) == 2
        if leaves or arrives or copied:
            raise RuntimeError(f"{NOT_PERMITTED} ({name})")


def _is_device(value: object) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "meta")


def _on_host(value: Any) -> Any:
    return _CPU if _is_card(value) else value
