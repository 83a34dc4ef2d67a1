"""Which way of reading is chosen, and what is said about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swarm.errors import InvalidOption
from swarm.models.flash.reading import drive_measurement
from swarm.models.flash.reading.io_choice import ComparedWay, choose_io, quickest
from swarm.models.flash.reading.record_reader import FlashIo
from tests.models.flash.reading.files import UNIT, random_file

DIRECT = ComparedWay(FlashIo.DIRECT, "direct, asynchronous reads", 0.002, 0.002)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_measurement, "ROUNDS", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random_file(tmp_path / "block-0.records", 300)
    return tmp_path / "block-0.records"


@pytest.mark.parametrize(
    ("cold", "warm", "share", "expected"),
    [
        (0.003, 0.001, 0.0, FlashIo.DIRECT),
        (0.003, 0.001, 0.4, FlashIo.DIRECT),
        (0.003, 0.001, 0.6, FlashIo.CACHED),  # the page cache holds so much that it pays
        (0.001, 0.001, 0.0, FlashIo.CACHED),
    ],
)
def test_the_quicker_way_is_chosen(cold: float, warm: float, share: float, expected: FlashIo) -> None:
    cached = ComparedWay(FlashIo.CACHED, "cached, 32 threads", cold, warm)
    for ways in ([DIRECT, cached], [cached, DIRECT]):
        assert quickest(ways, 16384, share)[0] is expected


def test_the_reason_has_both_times() -> None:
    cached = ComparedWay(FlashIo.CACHED, "cached, 32 threads", 0.004, 0.001)
    assert quickest([cached, DIRECT], 16000, 0.5)[1] == (
        "direct, asynchronous reads: 64 reads of 16 KB take 2.0 ms (cached, 32 threads: 2.5 ms), "
        "if 50% of what is read is in the page cache"
    )


def _no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    really, flag = os.open, getattr(os, "O_DIRECT", 0)

    def refuse_direct(path: Path, flags: int) -> int:
        if flags & flag:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags)

    monkeypatch.setattr(os, "open", refuse_direct)


def test_auto_tries_both_ways(path: Path) -> None:
    choice = choose_io(path, None, 4 * UNIT)
    assert choice.speed.io == choice.io
    assert 4 * UNIT in choice.speed.read_bytes
    assert "cached" in choice.reason


@pytest.mark.parametrize("record_bytes", [UNIT, 40 << 20])
def test_a_request_is_followed(path: Path, record_bytes: int) -> None:
    choice = choose_io(path, FlashIo.CACHED, record_bytes)
    assert (choice.io, choice.speed.io) == (FlashIo.CACHED, "cached")
    assert choice.reason == "cached, 32 threads: as asked for"


def test_a_file_system_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_direct_reads(monkeypatch)
    choice = choose_io(path, None, 4 * UNIT)
    assert choice.io is FlashIo.CACHED
    assert choice.reason == f"cached, 32 threads: the file system of {path} has no direct reads"
    with pytest.raises(InvalidOption, match="--flash-io cached"):
        choose_io(path, FlashIo.DIRECT, 4 * UNIT)


def test_a_file_shorter_than_a_record_that_is_compared(tmp_path: Path) -> None:
    random_file(tmp_path / "file", 2)
    assert choose_io(tmp_path / "file", None, 64 * UNIT).speed.read_bytes == (UNIT,)
