"""What layers with a state keep of a sequence: not keys and values, but a state that each token changes.

A state cannot be rolled back by dropping what lies behind a position. So a step computes on a copy, which a commit
makes the session's; and a `StateHistory` also keeps the states of a point not far back, and the inputs since, from
which the positions between are computed again.

transformers asks its cache for the states of a layer (`Cache.get_conv_state` and others), and changes them in place or
gives new ones. `StateBatch` answers for the rows of a forward, which belong to many sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from swarm.data_structures import StepLayout
from swarm.errors import WrongPosition

KEPT_INPUTS = 1024
"""Tokens of a sequence behind a kept point, at most: as many are computed again if the sequence goes back."""

POINT_EVERY = 64
"""Tokens, in steps of single ones, after which a new point is kept."""

StateKey = tuple[int, str, int]
"""Number of a layer, "conv" or "recurrent", and which of its states of that kind."""

States = Mapping[StateKey, torch.Tensor]
"""States of sequences `[sequences, ...]`; a missing one is that of sequences that have not begun: zero."""


class StagedStates:
    """The states of sequences while a step is computed. The states that it begins with are not changed.

    Attributes:
        begins_with: at which states.
        origin: where all its sequences come from: where the session is, the kept point, nowhere, or several of these.
    """

    def __init__(
        self,
        sequences: int,
        begins_with: States | None = None,
        origin: Literal["now", "kept", "nowhere", "several"] = "nowhere",
    ) -> None:
        self.sequences = sequences
        self.begins_with: States = begins_with if begins_with is not None else {}
        self.origin = origin
        self._own: dict[StateKey, torch.Tensor] = {}

    @property
    def result(self) -> States:
        """The states behind what was computed."""
        return {**self.begins_with, **self._own}

    def rows(self, key: StateKey, first: int, count: int) -> torch.Tensor | None:
        """The state of some sequences. It may be changed in place only if it is that of all of them."""
        if count < self.sequences:
            whole = self._own.get(key, self.begins_with.get(key))
            return whole[first : first + count] if whole is not None else None
        if key not in self._own and key in self.begins_with:
            self._own[key] = self.begins_with[key].clone()
        return self._own.get(key)

    def put_rows(self, key: StateKey, first: int, rows: torch.Tensor) -> None:
        """Take the new state of some sequences, of which only this may keep the tensor if it is that of all."""
        if len(rows) == self.sequences:
            self._own[key] = rows
            return
        if key not in self._own:
            before = self.begins_with.get(key)
            self._own[key] = before.clone() if before is not None else rows.new_zeros(self.sequences, *rows.shape[1:])
        self._own[key][first : first + len(rows)] = rows


class StateBatch:
    """The states of the rows of a forward, as the layers see them.

    Args:
        groups: staged states, number of the first sequence and count, in the order of the rows.
    """

    def __init__(self, groups: Sequence[tuple[StagedStates, int, int]]) -> None:
        self._groups = groups
        self._given: dict[StateKey, torch.Tensor] = {}
        """States of the layer that is computed, until another one is."""

    def get(self, key: StateKey) -> torch.Tensor | None:
        """The state of all rows, which the layer may change in place; None if no row has any."""
        self._put_back_others(key[0])
        if key not in self._given:
            found = [staged.rows(key, first, count) for staged, first, count in self._groups]
            like = next((one for one in found if one is not None), None)
            if like is None:
                return None
            rows = [
                one if one is not None else like.new_zeros(count, *like.shape[1:])
                for one, (_, _, count) in zip(found, self._groups, strict=True)
            ]
            is_whole = len(rows) == 1 and len(rows[0]) == self._groups[0][0].sequences
            self._given[key] = rows[0] if is_whole else torch.cat(rows)
        return self._given[key]

    def put(self, key: StateKey, rows: torch.Tensor) -> None:
        """Take a layer's new state of all rows."""
        self._put_back_others(key[0])
        self._given[key] = rows

    def append_conv(self, key: StateKey, new: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """The inputs of a convolution: those that it remembers, and new ones `[rows, channels, tokens]`."""
        before = self.get(key)
        inputs = new if before is None else torch.cat([before, new], dim=-1)
        size = before.shape[-1] if before is not None else kernel or new.shape[-1]
        self.put(key, functional.pad(inputs, (max(0, size - inputs.shape[-1]), 0))[..., -size:].contiguous())
        return inputs

    def finish(self) -> None:
        """Give all states back to the sequences. Call it when the forward has ended."""
        self._put_back_others(None)

    def _put_back_others(self, layer: int | None) -> None:
        for key in [one for one in self._given if one[0] != layer]:
            rows = self._given.pop(key)
            row = 0
            for staged, first, count in self._groups:
                one = rows[row : row + count]
                # A tensor that is only part of a larger one would keep all of that in memory.
                staged.put_rows(key, first, one if len(rows) == count else one.clone())
                row += count


class StatefulCache(Cache):
    """What layers with a state ask of their cache. Subclasses say which `states` there are."""

    @property
    def states(self) -> StateBatch:
        """The states of the rows of the forward."""
        raise NotImplementedError

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return layer_idx is not None and self.get_conv_state(layer_idx, state_idx or 0) is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.states.append_conv((layer_idx, "conv", state_idx), conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.states.put((layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states


@dataclass(frozen=True)
class _Point:
    """States at some positions, one for each sequence."""

    positions: tuple[int, ...] = ()
    states: States = field(default_factory=dict)

    def first_sequence(self) -> _Point:
        """That of the first sequence alone, in memory of its own."""
        return _Point(self.positions[:1], {key: state[:1].clone() for key, state in self.states.items()})


class StateHistory:
    """The states of a session's sequences: where they are, and at one point before."""

    def __init__(self) -> None:
        self._now = _Point()
        self._kept: _Point | None = None
        self._inputs: list[list[torch.Tensor]] = []
        """For each sequence, what was computed behind the kept point."""

    def inputs_again(self, layout: StepLayout) -> list[torch.Tensor] | None:
        """What has to be computed again before a step's own tokens, `[tokens, hidden]` for each sequence.

        None if no sequence goes back. Raises `WrongPosition` if one goes back too far.
        """
        if not self._now.states:
            return None
        again: list[torch.Tensor | None] = []
        for source, start in zip(_sources(layout), layout.starts, strict=True):
            if start in (0, self._position(source)):
                again.append(None)
                continue
            kept = self._kept.positions[source] if self._kept is not None else None
            if kept is None or kept > start:
                raise WrongPosition(
                    f"the states of these blocks cannot go back to position {start}, only to "
                    f"{f'positions from {kept} on' if kept is not None else 'the beginning'}: send the tokens again"
                )
            again.append(torch.cat(self._inputs[source])[: start - kept])
        if all(one is None for one in again):
            return None
        like = next(one for one in again if one is not None)
        return [one if one is not None else like[:0] for one in again]

    def stage(self, layout: StepLayout) -> StagedStates:
        """The states at the starts of a step, each of which is 0, or where a sequence is, or the kept point."""
        if not self._now.states:
            return StagedStates(layout.sequences)
        sources = _sources(layout)
        origins = [self._origin(source, start) for source, start in zip(sources, layout.starts, strict=True)]
        if set(origins) == {"nowhere"}:
            return StagedStates(layout.sequences)
        points = {"now": self._now, "kept": self._kept or self._now}
        if len(set(origins)) == 1 and sources == tuple(range(len(points[origins[0]].positions))):
            return StagedStates(layout.sequences, points[origins[0]].states, origins[0])
        states: dict[StateKey, torch.Tensor] = {}
        for key, like in self._now.states.items():
            states[key] = like.new_zeros(layout.sequences, *like.shape[1:])
            for row, (source, origin) in enumerate(zip(sources, origins, strict=True)):
                if origin != "nowhere" and key in points[origin].states:
                    states[key][row] = points[origin].states[key][source]
        return StagedStates(layout.sequences, states, "several")

    def commit(self, staged: StagedStates, layout: StepLayout, inputs_TH: torch.Tensor) -> None:
        """Take the states behind a step, which brought these inputs, packed."""
        before, states = self._now, staged.result
        if not states:
            return
        inputs = inputs_TH.split(list(layout.counts))
        self._now = _Point(layout.lengths, states)
        if staged.origin == "several":
            self._kept, self._inputs = None, []
            return
        if staged.origin == "nowhere":
            self._kept, self._inputs = _Point((0,) * layout.sequences), [[one] for one in inputs]
        elif staged.origin == "kept":
            self._inputs = [[one] for one in inputs]
        elif self._kept is None or max(layout.counts) > 1 or self._longest() >= POINT_EVERY:
            self._kept, self._inputs = before, [[one] for one in inputs]
        else:
            for kept, one in zip(self._inputs, inputs, strict=True):
                kept.append(one)
        if self._longest() > KEPT_INPUTS:
            self._kept, self._inputs = None, []

    def first_sequence(self, length: int) -> StateHistory:
        """The history of the first sequence alone, which goes on at `length`. Raises `WrongPosition` if it cannot."""
        result = StateHistory()
        if self._now.states:
            self.inputs_again(StepLayout((length,), (1,)))
            result._now = self._now.first_sequence()
            result._kept = self._kept.first_sequence() if self._kept is not None else None
            result._inputs = [list(one) for one in self._inputs[:1]]
        return result

    def _position(self, source: int) -> int:
        return self._now.positions[source] if source < len(self._now.positions) else 0

    def _origin(self, source: int, start: int) -> Literal["now", "kept", "nowhere"]:
        if not start:
            return "nowhere"
        return "now" if start == self._position(source) else "kept"

    def _longest(self) -> int:
        return max((sum(map(len, one)) for one in self._inputs), default=0)


def _sources(layout: StepLayout) -> tuple[int, ...]:
    return layout.sources if layout.sources is not None else tuple(range(layout.sequences))
