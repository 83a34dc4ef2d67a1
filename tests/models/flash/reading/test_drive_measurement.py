"""Measuring a drive: one with known times on a virtual clock, and the real one of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from swarm.errors import InvalidOption, NotEnoughSpace
from swarm.models.flash.reading import drive_measurement
from swarm.models.flash.reading.drive_measurement import BATCH_READS, READ_BYTES, DriveProbe, measure_folder
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.reading.record_reader import FlashIo, check_reads
from swarm.models.flash.records.weight_store import FinishedRead
from tests.models.flash.reading.files import UNIT, random_file


@dataclass
class SimulatedDrive:
    """A `RecordReader` of a drive with a known latency and bandwidth, on a clock of its own."""

    latency_s: float
    bytes_per_s: float
    file_bytes: int = 1 << 30
    io: FlashIo = FlashIo.DIRECT
    path: Path = Path("simulated")
    how: str = "simulated"
    now: float = 0.0
    cold: bool = False
    begun: list[Reads] = field(default_factory=list)

    def begin(self, reads: Reads, memory: torch.Tensor) -> FinishedRead:
        check_reads(reads, memory)
        assert int((reads.offsets + reads.lengths).max()) <= self.file_bytes
        assert len(set(reads.places.tolist())) == len(reads)
        assert self.cold, "some of it may be in the page cache"
        self.cold = False
        self.begun.append(reads)
        self.now += self.latency_s + reads.nbytes / self.bytes_per_s
        return FinishedRead()

    def forget_cached(self) -> None:
        self.cold = True

    def close(self) -> None:
        pass

    def clock(self) -> float:
        return self.now


@pytest.fixture
def drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedDrive:
    drive = SimulatedDrive(*request.param)
    monkeypatch.setattr(drive_measurement.time, "perf_counter", drive.clock)
    monkeypatch.setattr(drive_measurement.time, "monotonic", drive.clock)
    return drive


@pytest.mark.parametrize("drive", [(1e-4, 2e9)], indirect=True)
def test_the_speed_of_a_known_drive_is_found(drive: SimulatedDrive) -> None:
    speed = DriveProbe(drive).speed(record_bytes=12 * UNIT)
    assert speed.read_bytes == (4 << 10, 16 << 10, 48 << 10, 64 << 10, 256 << 10, 1 << 20)
    assert speed.batch_reads == BATCH_READS
    for reads, size in ((1, 4096), (10, 12 * UNIT), (400, 16 << 10), (8, 8 << 20)):
        assert speed.seconds(reads, size) == pytest.approx(1e-4 + reads * size / 2e9)
    assert drive.now < 3 * drive_measurement.MEASUREMENT_S


@pytest.mark.parametrize("drive", [(0.012, 1e8), (1e-3, 2e7)], indirect=True, ids=["hard disk", "memory card"])
def test_a_slow_drive_is_measured_with_fewer_reads(drive: SimulatedDrive) -> None:
    speed = DriveProbe(drive).speed()
    assert speed.batch_reads[-1] < BATCH_READS[-1]
    assert drive.now < 3 * drive_measurement.MEASUREMENT_S


@pytest.mark.parametrize("drive", [(1e-4, 2e9)], indirect=True)
def test_places_differ_from_batch_to_batch(drive: SimulatedDrive) -> None:
    DriveProbe(drive).speed()
    places = [tuple(reads.offsets.tolist()) for reads in drive.begun if reads.lengths[0] == UNIT]
    assert len(set(places)) == len(places) > 1


@pytest.mark.parametrize("units", [1, 5, 300])
@pytest.mark.parametrize("io", list(FlashIo))
def test_a_real_file_however_short(io: FlashIo, units: int, tmp_path: Path) -> None:
    random_file(tmp_path / "file", units)
    try:
        reader = open_reader(tmp_path / "file", io)
    except InvalidOption:
        pytest.skip("the file system of the temporary folder has no direct reads")
    speed = DriveProbe(reader).speed(record_bytes=2 * UNIT, seconds=0.2)
    reader.close()
    expected = [size for size in sorted({*READ_BYTES, 2 * UNIT}) if size <= units * UNIT]
    assert list(speed.read_bytes) == expected
    assert speed.io == io
    assert speed.seconds(64, 2 * UNIT) > 0


def test_an_empty_file_cannot_be_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    reader = open_reader(tmp_path / "file", FlashIo.CACHED)
    with pytest.raises(ValueError, match="too short"):
        DriveProbe(reader)
    reader.close()


def test_a_folder_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_measurement, "SCRATCH_BYTES", 8 << 20)
    speed = measure_folder(tmp_path)
    assert speed.bytes_per_second(1 << 20) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = list(os.statvfs(tmp_path))
    status[4] = 1  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(status))
    with pytest.raises(NotEnoughSpace, match=r"is full.*Free some space"):
        measure_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        measure_folder(tmp_path / "missing")
