"""Padded rows and packed tokens, without a network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.wire.packed_hidden import PaddedBatch, pack_hidden, packed_texts, position_offsets, unpack_hidden
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import UsageError


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_what_is_packed_comes_back_and_padding_is_zero(mask: list[list[bool]]) -> None:
    real = torch.tensor(mask)
    hidden = torch.randn(*real.shape, 3)
    packed = pack_hidden(hidden, real, WireFormat.NONE)
    assert packed.tokens == int(real.sum())
    back = unpack_hidden(packed, hidden, real)
    assert torch.equal(back, hidden * real[..., None])


def test_offsets_of_positions():
    for positions, real, starts, expected in [
        (None, None, (0, 0), None),
        ([[0, 1, 2]], None, (0, 0), None),  # just counted
        ([[5, 6, 7]], None, (5, 5), None),
        ([[5, 6, 7]], None, (3, 5), (2, 0)),
        ([[0, 1, 2]], [[0, 1, 1], [1, 1, 1]], (0, 0), (1, 0)),  # padding was counted
        ([[0, 0, 1], [0, 1, 2]], [[0, 1, 1], [1, 1, 1]], (0, 0), None),  # padding was not counted
    ]:
        counts = (3, 3) if real is None else tuple(map(sum, real))
        layout = StepLayout(starts, counts)
        found = position_offsets(
            torch.tensor(positions) if positions is not None else None,
            torch.tensor(real).bool() if real is not None else None,
            layout,
        )
        assert found == expected


def test_positions_that_cannot_travel_are_refused():
    for positions, real, starts in [
        ([[0, 1, 0], [0, 1, 2]], None, (0, 0)),  # begins again
        ([[0, 1, 2], [0, 2, 3]], None, (0, 0)),  # a gap
        ([[0, 0, 1], [0, 1, 2]], None, (0, 0)),  # twice
        ([[2, 1, 0], [0, 1, 2]], None, (0, 0)),  # backwards
        ([[-1, 0, 1], [0, 1, 2]], None, (0, 0)),  # negative
        ([[4, 5, 6], [5, 6, 7]], None, (5, 5)),  # less than the tokens before
        ([[0, 1, 2], [0, 1, 2]], [[1, 1, 1], [1, 0, 1]], (0, 0)),  # a gap where the mask has a hole
        ([[[0, 1, 2]] * 2] * 3, None, (0, 0)),  # rows, columns and time of pictures
    ]:
        counts = (3, 3) if real is None else tuple(map(sum, real))
        mask = torch.tensor(real).bool() if real is not None else None
        with pytest.raises(UsageError, match="position_ids"):
            position_offsets(torch.tensor(positions), mask, StepLayout(starts, counts))


def test_packed_texts_end_where_positions_do_not_count_on():
    assert packed_texts(torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])) is None
    assert packed_texts(torch.tensor([[0, 1, 0, 1], [5, 6, 8, 7]])) == [2, 2, 2, 1, 1]


def test_some_rows_of_a_batch():
    real = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    rows = PaddedBatch((2, 3, 0), real, torch.arange(3).expand(3, -1))
    assert rows.layout == StepLayout((0, 0, 0), (2, 3, 0), None, (1, 0, 0), (3, 3, 0))
    assert rows[torch.tensor([1, 0])].layout == StepLayout((0, 0), (3, 2), None, (0, 1), (3, 3))
    assert rows[1:2].layout == StepLayout((0,), (3,), rope_lengths=(3,))
    assert PaddedBatch((3, 3), None, None)[torch.tensor([1])].layout == StepLayout((0,), (3,), rope_lengths=(3,))
