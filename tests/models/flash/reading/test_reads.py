"""Coalescing against reading each record by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.reading.reads import coalesce
from swarm.models.flash.records.record_buffer import Indices

STRIDE, UNIT = 8192, 4096


@st.composite
def _requests(draw: st.DrawFn) -> tuple[Indices, Indices]:
    """Records in runs, as predictors and prompts ask for them, and a slot of its own for each."""
    runs = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=6))
    records = np.concatenate([np.arange(start, start + length) for start, length in runs] or [np.arange(0)])
    slots = np.arange(len(records)) + draw(st.integers(0, 5))
    if draw(st.booleans()):
        slots = np.array(draw(st.permutations(slots.tolist())), dtype=np.int64)
    order = np.array(draw(st.permutations(range(len(records)))), dtype=np.int64)
    return records[order].astype(np.int64), slots[order].astype(np.int64)


def _bytes_read(offsets: Indices, lengths: Indices, places: Indices) -> dict[int, int]:
    """For each unit of memory that is written, the unit of the file that goes there."""
    return {
        place + done: offset + done
        for offset, length, place in zip(offsets.tolist(), lengths.tolist(), places.tolist(), strict=True)
        for done in range(0, length, UNIT)
    }


@given(_requests(), st.integers(1, 9), st.integers(0, 3))
def test_each_record_comes_to_its_slot(requests: tuple[Indices, Indices], units: int, file_units: int) -> None:
    records, slots = requests
    reads = coalesce(records, slots, STRIDE, file_units * UNIT, units * UNIT)
    naive = _bytes_read(file_units * UNIT + records * STRIDE, np.full(len(records), STRIDE), slots * STRIDE)
    assert _bytes_read(reads.offsets, reads.lengths, reads.places) == naive
    assert reads.nbytes == len(records) * STRIDE
    assert all(0 < length <= units * UNIT for length in reads.lengths.tolist())


@given(_requests())
def test_different_records_need_no_more_reads_than_runs(requests: tuple[Indices, Indices]) -> None:
    slot_of = dict(zip(*(indices.tolist() for indices in requests), strict=True))
    records = sorted(slot_of)
    runs = sum(slot_of.get(record - 1, -2) != slot_of[record] - 1 for record in records)
    slots = [slot_of[record] for record in records]
    reads = coalesce(np.array(records, dtype=np.int64), np.array(slots, dtype=np.int64), STRIDE, max_bytes=1 << 30)
    assert len(reads) == runs


def test_neighbors_are_read_as_one_and_long_runs_in_pieces() -> None:
    reads = coalesce(np.array([7, 3, 4, 5]), np.array([9, 0, 1, 2]), STRIDE)
    assert reads.offsets.tolist() == [3 * STRIDE, 7 * STRIDE]
    assert reads.lengths.tolist() == [3 * STRIDE, STRIDE]
    assert reads.places.tolist() == [0, 9 * STRIDE]
    pieces = coalesce(np.arange(10), np.arange(10), STRIDE, max_bytes=4 * STRIDE)
    assert pieces.lengths.tolist() == [4 * STRIDE, 4 * STRIDE, 2 * STRIDE]
    assert len(coalesce(np.arange(0), np.arange(0), STRIDE)) == 0
