from __future__ import annotations

import errno
import os
import stat

import pytest

from swarm.common.files.atomic_file import read_small, replace_file


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "content.json"
    path.write_bytes(b"old")
    return path


def test_it_replaces_what_is_there(path):
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_only_small_files_are_read(path):
    assert read_small(path, 3) == b"old"
    with pytest.raises(ValueError, match="it is larger than 2 bytes"):
        read_small(path, 2)


def test_it_makes_a_file_that_was_not_there(tmp_path):
    replace_file(tmp_path / "first", b"")
    assert (tmp_path / "first").read_bytes() == b""


def test_only_the_owner_may_read_it(path):
    path.chmod(0o644)
    before = os.umask(0)
    try:
        replace_file(path, b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_content_is_on_the_drive_before_the_name(path, monkeypatch):
    """Else a power failure could leave an empty file under the name."""
    done, replace = [], os.replace

    def record_replace(source, target):
        done.append("replace")
        replace(source, target)

    def record_fsync(descriptor):
        done.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    replace_file(path, b"12345")
    assert done == [5, "replace"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(path, monkeypatch, call, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_in_its_place_stays(tmp_path):
    folder = tmp_path / "content.json"
    folder.mkdir()
    with pytest.raises(OSError, match=r"content\.json"):
        replace_file(folder, b"new")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "missing" / "file", b"new")
