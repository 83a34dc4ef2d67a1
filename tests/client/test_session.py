"""Packing rows for the wire, without a network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.session import InferenceSession, pack_rows, position_offsets, unpack_rows
from swarm.data_structures import StepLayout, WireFormat

CONNECTION = SimpleNamespace(config=SimpleNamespace(wire=WireFormat.NONE))


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_what_is_packed_comes_back_and_padding_is_zero(mask: list[list[bool]]) -> None:
    real = torch.tensor(mask)
    hidden = torch.randn(*real.shape, 3)
    packed = pack_rows(hidden, real, CONNECTION)
    assert packed.tokens == int(real.sum())
    back = unpack_rows(packed, hidden, real)
    assert torch.equal(back, hidden * real[..., None])


def test_without_padding_nothing_is_copied_around():
    hidden = torch.randn(2, 3, 4)
    assert torch.equal(unpack_rows(pack_rows(hidden, None, CONNECTION), hidden, None), hidden)


@pytest.mark.parametrize(
    ("positions", "real", "starts", "expected"),
    [
        (None, None, (0, 0), None),
        ([[0, 1, 2]], None, (0, 0), None),  # just counted
        ([[5, 6, 7]], None, (5, 5), None),
        ([[5, 6, 7]], None, (3, 5), (2, 0)),
        ([[0, 1, 2]], [[0, 1, 1], [1, 1, 1]], (0, 0), (1, 0)),  # padding was counted
        ([[0, 0, 1], [0, 1, 2]], [[0, 1, 1], [1, 1, 1]], (0, 0), None),  # padding was not counted
    ],
)
def test_offsets_of_positions(positions, real, starts, expected):
    counts = (3, 3) if real is None else tuple(map(sum, real))
    layout = StepLayout(starts, counts)
    found = position_offsets(
        torch.tensor(positions) if positions is not None else None,
        torch.tensor(real).bool() if real is not None else None,
        layout,
    )
    assert found == expected


def test_a_session_needs_room():
    with pytest.raises(ValueError, match="max_length is 0"):
        InferenceSession(None, CONNECTION, 0)
