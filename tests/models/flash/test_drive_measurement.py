"""Measuring the drive of a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.errors import NotEnoughSpace
from swarm.models.flash import drive_measurement
from swarm.models.flash.drive_measurement import measure_folder


def test_a_folder_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_measurement, "SCRATCH_BYTES", 8 << 20)
    speed = measure_folder(tmp_path)
    assert speed.large > speed.small > 0
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
