"""How rows are divided among lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.lanes.generate_in_lanes import MAX_LANES, choose_lane_count, split_sequences, validate_lane_count
from swarm.errors import InvalidOption


@pytest.mark.parametrize(
    ("wanted", "rows", "stages", "lanes"),
    [
        ("auto", 8, 3, 3),
        ("auto", 2, 3, 2),  # no lane without a row
        ("auto", 1, 5, 1),
        (4, 8, 2, 4),
        (4, 3, 2, 3),
        (1, 8, 3, 1),
        ("auto", 1000, 600, MAX_LANES),
    ],
)
def test_how_many(wanted: int | str, rows: int, stages: int, lanes: int) -> None:
    assert choose_lane_count(wanted, rows, stages) == lanes  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(1, MAX_LANES))
def test_every_row_is_in_one_lane_in_order_and_lanes_are_nearly_equal(rows: int, wanted: int) -> None:
    lanes = choose_lane_count(wanted, rows, 1)
    parts = split_sequences(rows, lanes)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(sizes) == lanes
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("wanted", [0, -1, MAX_LANES + 1, "many", 2.0, True, None])
def test_what_is_no_number_of_lanes(wanted: object) -> None:
    with pytest.raises(InvalidOption, match="neither"):
        validate_lane_count(wanted)  # type: ignore[arg-type]


def test_what_is() -> None:
    for wanted in (1, MAX_LANES, "auto"):
        validate_lane_count(wanted)  # type: ignore[arg-type]
