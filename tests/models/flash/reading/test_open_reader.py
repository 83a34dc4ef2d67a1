"""How a file is opened where the file system or the kernel lacks something."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swarm.errors import InvalidOption, PackedFileError
from swarm.models.flash.reading.kernel_aio import AsyncReads, KernelAio
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.flash.reading.thread_reader import ThreadReader
from tests.models.flash.reading.files import aligned_memory, random_file, reads_of_units


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random_file(tmp_path / "block-0.records", 8)
    return tmp_path / "block-0.records"


def _has_direct_reads(path: Path) -> bool:
    try:
        open_reader(path, FlashIo.DIRECT).close()
    except InvalidOption:
        return False
    return True


@pytest.mark.parametrize("folder", ["tmp_path", "/dev/shm"])
@pytest.mark.parametrize("io", list(FlashIo))
def test_every_file_system_can_be_read(folder: str, io: FlashIo, tmp_path: Path) -> None:
    where = tmp_path if folder == "tmp_path" else Path(folder)
    if not os.access(where, os.W_OK):
        pytest.skip(f"no {folder} here")
    path = where / f"swarm-test-{os.getpid()}.records"
    content = random_file(path, 8)
    try:
        if io is FlashIo.DIRECT and not _has_direct_reads(path):
            return
        reader = open_reader(path, io)
    finally:
        path.unlink()
    memory = aligned_memory(8)
    reader.begin(reads_of_units([0, 4], [0, 4], length=4), memory).wait()
    assert memory.numpy().tobytes() == content
    assert (reader.io, reader.file_bytes) == (io, len(content))
    reader.close()


@pytest.mark.parametrize("when", ["open", "first read"])
def test_a_file_system_without_direct_reads(when: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open" if when == "open" else "preadv", refuse)
    if when == "first read":
        monkeypatch.setattr(os, "open", lambda path, flags: really(path, flags & ~getattr(os, "O_DIRECT", 0)))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(InvalidOption, match="--flash-io cached"):
        open_reader(path, FlashIo.DIRECT)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM, errno.EAGAIN])
def test_a_kernel_that_refuses_asynchronous_reads(error: int, path: Path) -> None:
    if not _has_direct_reads(path):
        pytest.skip("the file system of the temporary folder has no direct reads")

    class Refusing(KernelAio):
        def __init__(self) -> None:
            pass

        def setup(self, depth: int) -> int:
            return -error

    _reads_directly_with_threads(path, Refusing)


def test_a_system_without_asynchronous_reads(path: Path) -> None:
    if not _has_direct_reads(path):
        pytest.skip("the file system of the temporary folder has no direct reads")

    def missing() -> AsyncReads:
        raise OSError(errno.ENOSYS, "not on this system")

    _reads_directly_with_threads(path, missing)


def _reads_directly_with_threads(path: Path, calls: type[KernelAio] | object) -> None:
    reader = open_reader(path, FlashIo.DIRECT, calls)  # type: ignore[arg-type]
    assert isinstance(reader, ThreadReader)
    assert reader.io is FlashIo.DIRECT
    memory = aligned_memory(8)
    reader.begin(reads_of_units([0], [0], length=8), memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


@pytest.mark.parametrize("io", list(FlashIo))
def test_a_file_that_cannot_be_opened(io: FlashIo, tmp_path: Path) -> None:
    with pytest.raises(PackedFileError, match=r"missing cannot be opened.*swarm flash prepare"):
        open_reader(tmp_path / "missing", io)
