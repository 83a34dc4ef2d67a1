"""Reading hidden states by those operations of a model's forward alone that depend on them: final norm, head, and what
the family does to logits.

The forward of a family's model also embeds tokens, builds masks and positions, and asks its config many things. Where
early hidden states are read for every token, that takes several times as long as norm and head of a small model. So one
forward is recorded, what depends on the hidden states is kept, and later ones compute only that. No family is known
here: the forward stays the reference, and a recording counts only if it gives the same logits, bit for bit, for hidden
states other than those with which it was made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

Reading = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states behind the last block, or as if they were, to logits, in inference."""

MAX_RECORDINGS = 64
"""One for each shape of hidden states, that is for each number of rows; those that were used last are kept. A recording
is a list of calls and no copy of weights, and to make one takes as long as a few forwards."""


class DirectReading:
    """A reading that computes only what depends on hidden states, as far as that gives the same logits.

    Not for hidden states that require gradients.

    Args:
        whole: a model's forward. Weights may change, but stay the same tensors.
        alone: in which forwards are recorded and compared: nothing of them may be computed by another thread.
    """

    def __init__(self, whole: Reading, alone: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._whole, self._alone = whole, alone
        self._readings: OrderedDict[tuple[torch.Size, torch.dtype, torch.device], Reading] = OrderedDict()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        reading = self.prepare(hidden)
        with torch.no_grad():
            return reading(hidden)

    def prepare(self, hidden: torch.Tensor) -> Reading:
        """How hidden states like these are read, which takes a few forwards to find out at first."""
        key = (hidden.shape, hidden.dtype, hidden.device)
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = self._chosen(hidden)
            if len(self._readings) > MAX_RECORDINGS:
                self._readings.popitem(last=False)
        self._readings.move_to_end(key)
        return reading

    @torch.no_grad()
    def _chosen(self, hidden: torch.Tensor) -> Reading:
        """The recording for hidden states like these, or the whole forward if that reads them in another way."""
        example = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape).to(hidden.dtype)
        with self._alone():
            recorded = record(self._whole, example)
            if recorded is not None and torch.equal(recorded(hidden), self._whole(hidden)):
                return recorded
        logger.debug("hidden states of shape %s are read with the whole forward", list(hidden.shape))
        return self._whole


def record(whole: Reading, example: torch.Tensor) -> Reading | None:
    """The operations of a forward that depend on its hidden states; None if its result does not.

    Only calls of torch's functions are seen that take and return tensors as such, not inside of lists. So the caller
    has to check what the recording is worth.

    Args:
        example: hidden states to record it with. The recording is for others of the same shape, dtype and device.
    """
    with _Recorder(example) as recorder:
        result = whole(example)
    place = recorder.place(result)
    if place is None:
        return None
    operations = _needed(recorder.operations, place)

    def reading(hidden: torch.Tensor) -> torch.Tensor:
        values = {_FIRST: hidden}
        for one in operations:
            arguments = [values[value.place] if type(value) is _Value else value for value in one.arguments]
            values[one.result] = one.function(*arguments, **one.settings)
        return values[place]

    return reading


_FIRST = 0
"""Place of the hidden states among the values of a recording."""


@dataclass(frozen=True)
class _Value:
    """Stands for a value of the recording among the arguments of an operation."""

    place: int


@dataclass(frozen=True)
class _Operation:
    """A call whose result depends on the hidden states.

    Attributes:
        result: place of its result.
    """

    function: Callable[..., torch.Tensor]
    arguments: Sequence[Any]
    settings: Mapping[str, Any]
    result: int


class _Recorder(TorchFunctionMode):
    """Meanwhile, calls of torch's functions by this thread are recorded that depend on `example`."""

    def __init__(self, example: torch.Tensor) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._places = {id(example): _FIRST}
        self._kept: list[torch.Tensor] = [example]
        """All values: one that is freed would leave its identity to another."""

    def place(self, value: object) -> int | None:
        """The place of a value that depends on the example; None for others."""
        return self._places.get(id(value))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = kwargs or {}
        result = func(*args, **settings)
        if isinstance(result, torch.Tensor):
            arguments = [_Value(self._places[id(one)]) if id(one) in self._places else one for one in args]
            if any(type(one) is _Value for one in arguments):
                self._kept.append(result)
                place = self._places.setdefault(id(result), len(self._kept))  # in place: that of its input
                self.operations.append(_Operation(func, arguments, settings, place))
        return result


def _needed(operations: Sequence[_Operation], place: int) -> list[_Operation]:
    """Those of the operations on which the value at a place depends, in order."""
    needed, found = {place}, []
    for one in reversed(operations):
        if one.result in needed:
            needed |= {value.place for value in one.arguments if type(value) is _Value}
            found.append(one)
    return found[::-1]
