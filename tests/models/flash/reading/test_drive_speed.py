"""What a drive's measured speed says about other sizes and numbers of reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.reading.drive_speed import DriveSpeed

msgspec = pytest.importorskip("msgspec")  # what computes does without; it decodes what was measured

LATENCY_S, BYTES_PER_S = 1e-4, 1e9
COUNTS, SIZES = (1, 4, 16, 64), (4096, 65536, 1 << 20)


def _seconds(reads: float, bytes_each: float) -> float:
    return LATENCY_S + reads * bytes_each / BYTES_PER_S


SPEED = DriveSpeed("direct", COUNTS, SIZES, tuple(tuple(_seconds(n, size) for n in COUNTS) for size in SIZES))


@given(st.floats(1, 64), st.floats(4096, 1 << 20))
def test_between_the_measured_points_it_is_linear(reads: float, bytes_each: float) -> None:
    assert SPEED.seconds(reads, bytes_each) == pytest.approx(_seconds(reads, bytes_each))


@given(st.sampled_from(COUNTS), st.sampled_from(SIZES))
def test_measured_points_are_kept(reads: int, bytes_each: int) -> None:
    assert SPEED.seconds(reads, bytes_each) == pytest.approx(_seconds(reads, bytes_each))


def test_outside_the_measured_points() -> None:
    assert SPEED.seconds(128, 65536) == pytest.approx(_seconds(128, 65536))
    assert SPEED.seconds(4, 4 << 20) == pytest.approx(_seconds(16, 1 << 20))
    assert SPEED.seconds(1, 512) == pytest.approx(_seconds(1, 4096))
    assert SPEED.seconds(0.5, 4096) == pytest.approx(_seconds(1, 4096))
    assert SPEED.seconds(0, 4096) == 0


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(65, 1000))
def test_a_disturbed_measurement_makes_no_drive_twice_as_fast(before: float, last: float, reads: float) -> None:
    speed = DriveSpeed("direct", (16, 64), (4096,), ((before, last),))
    in_proportion = reads / 64 * last
    assert (last + in_proportion) / 2 <= speed.seconds(reads, 4096) * (1 + 1e-9)
    assert speed.seconds(reads, 4096) <= in_proportion * (1 + 1e-9)


def test_bandwidth_grows_with_the_size() -> None:
    assert SPEED.bytes_per_second(4096) < SPEED.bytes_per_second(65536) < SPEED.bytes_per_second(1 << 20) < BYTES_PER_S


def test_it_travels_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SPEED), type=DriveSpeed) == SPEED


@pytest.mark.parametrize(
    "damage",
    [
        {"batch_reads": []},
        {"batch_reads": [4, 1, 16, 64]},
        {"read_bytes": [0, 65536, 1 << 20]},
        {"batch_seconds": [[1.0] * 4] * 2},
        {"batch_seconds": [[0.0] * 4] * 3},
    ],
)
def test_a_broken_description_is_refused(damage: dict[str, object]) -> None:
    broken = msgspec.json.encode({**msgspec.to_builtins(SPEED), **damage})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(broken, type=DriveSpeed)
