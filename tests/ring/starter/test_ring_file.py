"""The file that starts a ring again."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PartitionError, RingFileError, WorkerLineError
from swarm.ring.pairing import WorkerLine
from swarm.ring.starter.ring_options import (
    RingOptions,
    is_ring_file,
    options_of,
    parse_ring_file,
    partition_numbers,
    read_ring_file,
    write_ring_file,
)

LINES = tuple(WorkerLine(f"QmWorker{n}", f"pi {n}", ("/ip4/10.0.0.1/tcp/1",), bytes(16)) for n in (1, 2))


@pytest.mark.parametrize(
    "options",
    [
        RingOptions(None, LINES),
        RingOptions("org/model", LINES, (2, 5, 5), "main", "bfloat16", "int8", 2048, 4),
    ],
)
def test_what_was_saved_starts_the_same_ring(options, tmp_path):
    path = tmp_path / "ring.yaml"
    write_ring_file(path, options)
    assert options_of(read_ring_file(path)) == options
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_command_line_takes_the_place_of_the_file(tmp_path):
    path = tmp_path / "ring.yaml"
    write_ring_file(path, RingOptions("m", LINES, (2, 5, 5)))
    assert options_of(read_ring_file(path), {"partition": (4, 4, 4)}).partition == (4, 4, 4)


def test_a_file_that_cannot_be_used_names_the_field():
    for text, said in [
        ("model: m", "workers"),
        ("workers: []", "workers"),
        ("workers: [x]\nmodell: m", "modell"),
        ("workers: [x]\npartition: [2, -1]", "partition"),
        ("workers: [x]\ndtype: float64", "dtype"),
        ("- a", "object"),
        ("a: b: c", "YAML"),
    ]:
        with pytest.raises(RingFileError, match=said):
            parse_ring_file(text.encode())


def test_lines_and_partitions_are_checked():
    with pytest.raises(WorkerLineError):
        options_of(parse_ring_file(b"workers: [nonsense]"))
    with pytest.raises(PartitionError, match="needs 3"):
        RingOptions(None, LINES, (6, 6))


@given(st.lists(st.integers(0, 99), min_size=2, max_size=6))
def test_a_partition_is_a_text_or_numbers(numbers):
    assert partition_numbers(numbers) == partition_numbers("+".join(map(str, numbers))) == tuple(numbers)
    assert partition_numbers(None) is None


def test_a_model_is_not_taken_for_a_file(tmp_path):
    (tmp_path / "model.yaml").mkdir()
    assert is_ring_file("ring.yaml")
    assert is_ring_file("some/ring.yml")
    assert not is_ring_file(str(tmp_path / "model.yaml"))
    assert not is_ring_file("org/model")
    assert not is_ring_file(None)
