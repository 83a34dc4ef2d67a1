"""Folders of real processes, some of which are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.transport import process_folder
from swarm.transport.process_folder import LOCK_FILE, ProcessFolder, remove_abandoned_folders

OWNER = """
import sys
from swarm.transport.process_folder import ProcessFolder
folder = ProcessFolder()
(folder.path / "inner").mkdir()
(folder.path / "inner" / "socket").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch) -> Iterator[Path]:
    """The temporary directory of this process and of those that it starts."""
    with tempfile.TemporaryDirectory(prefix="swp-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder until its input ends."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def abandoned_folder() -> Path:
    with owner() as (process, folder):
        process.kill()
        process.wait()
    assert (folder / "inner" / "socket").exists()
    return folder


def test_a_folder_is_private_and_goes_with_its_process(directory):
    folder = ProcessFolder()
    assert folder.path.parent == directory
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.path.iterdir()] == [LOCK_FILE]
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    with owner() as (process, other):
        assert process.stdin is not None
        process.stdin.close()  # it ends in an orderly way
        assert process.wait() == 0
    assert not other.exists()


def test_only_folders_of_processes_that_were_killed_are_removed(directory):
    own = ProcessFolder()
    with owner() as (living, kept):
        gone = {abandoned_folder(), abandoned_folder()}
        assert remove_abandoned_folders() == 2
        assert not any(folder.exists() for folder in gone)
        assert (kept / "inner" / "socket").exists()
        assert own.path.exists()
        living.kill()
        living.wait()
        assert remove_abandoned_folders() == 1
    assert [*directory.iterdir()] == [own.path]
    own.remove()


def test_a_folder_stays_while_a_child_of_its_process_may_use_it(directory):
    """A forked process inherits the lock."""
    folder = ProcessFolder()
    assert folder._lock is not None
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[folder._lock]) as child:
        os.close(folder._lock)  # as if this process had been killed
        folder._lock = None
        assert remove_abandoned_folders() == 0
    assert child.returncode == 0
    assert remove_abandoned_folders() == 1
    assert [*directory.iterdir()] == []
    folder.remove()  # nothing is left to remove


def test_folders_that_are_not_known_to_be_ours_stay(directory, tmp_path):
    (directory / "swarm-empty").mkdir()
    (directory / "other").mkdir()
    (directory / "other" / LOCK_FILE).touch()
    (directory / "swarm-file").touch()
    (directory / "swarm-pipe").mkdir()
    os.mkfifo(directory / "swarm-pipe" / LOCK_FILE)
    before = sorted(directory.iterdir())
    assert remove_abandoned_folders() == 0
    assert sorted(directory.iterdir()) == before


def test_symbolic_links_are_not_followed(directory, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (elsewhere / "precious").touch()
    (directory / "swarm-link").symlink_to(elsewhere)
    (directory / "swarm-lock-link").mkdir()
    (directory / "swarm-lock-link" / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    assert remove_abandoned_folders() == 0
    assert (directory / "swarm-lock-link").exists()
    gone = abandoned_folder()
    (gone / "link").symlink_to(elsewhere)
    assert remove_abandoned_folders() == 1
    assert not gone.exists()
    assert (elsewhere / "precious").exists()


def test_folders_of_other_users_stay(monkeypatch):
    folder = abandoned_folder()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert remove_abandoned_folders() == 0
    assert folder.exists()


def test_without_file_locks_a_folder_is_never_removed_by_others(monkeypatch):
    def no_locks(*_):
        raise OSError("no locks on this file system")

    with monkeypatch.context() as patch:
        patch.setattr(process_folder.fcntl, "flock", no_locks)
        folder = ProcessFolder()
    assert remove_abandoned_folders() == 0
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_a_long_temporary_directory_is_replaced_because_sockets_have_short_paths(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    folder = ProcessFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()
