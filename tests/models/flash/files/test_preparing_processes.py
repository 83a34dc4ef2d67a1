"""Real processes that prepare the same model: killed in the middle, or two at once."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files.block_files import packed_files
from swarm.models.flash.files.inventory import remove_stored, stored_models
from tests.models.flash.files.preparations import assert_holds_block, make_checkpoint, open_packed, packed, prepare
from tests.models.flash.files.preparing_process import STOPPED
from tests.models.flash.largest_plan import plan_largest
from tests.slow import slow_except
from tests.waiting import wait_until

FILES_A_BLOCK = 3
NEW_MOUNTS = ("unshare", "--map-root-user", "--mount")
NEVER = 1000


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("zoo"))


@contextmanager
def preparing(
    llama, root, blocks: str, files: int, before: str = "true", wrapper: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process that prepares blocks, after the shell command `before`, which may mount file systems for it.

    `wrapper` is a command that runs others.
    """
    command = [sys.executable, "-m", "tests.models.flash.files.preparing_process", llama.source, str(root), blocks]
    shell = f"{before} && exec {shlex.join([*command, str(files)])}"
    process = subprocess.Popen(
        [*(NEW_MOUNTS if before != "true" else ()), *wrapper, "sh", "-c", shell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the process wrote up to the line with `text`."""
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} is not in {seen!r}")


@pytest.mark.parametrize("files", slow_except([0, FILES_A_BLOCK - 1, FILES_A_BLOCK + 1], FILES_A_BLOCK + 1))
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_finished(llama, tmp_path, files):
    """Killed when this many of six files were finished, and the next one was written but not yet renamed."""
    with preparing(llama, tmp_path, "2:4", files) as process:
        read_until(process, STOPPED)
        process.kill()
        process.wait()
    left = packed_files(packed(llama, tmp_path).folder)
    assert len([file for file in left if file.finished]) == files
    assert len([file for file in left if not file.finished]) == 1
    finished = files // FILES_A_BLOCK
    for block in range(2, 4)[:finished]:
        assert_holds_block(open_packed(llama, tmp_path, block), llama, torch.float32)
    for block in range(2, 4)[finished:]:
        with pytest.raises(PackedFileError, match=f"block {block} of llama is not prepared for flash"):
            open_packed(llama, tmp_path, block)

    written = prepare(llama, Span(1, 3), dtype=torch.float32, root=tmp_path, plan_of=plan_largest)
    assert written == ([1] if finished else [1, 2])
    left = packed_files(packed(llama, tmp_path).folder)
    blocks = [1] * FILES_A_BLOCK + [2] * FILES_A_BLOCK
    assert [file.block for file in left] == blocks, "what the killed process left is removed"


def test_ctrl_c_leaves_finished_blocks_and_nothing_else(llama, tmp_path):
    """In the middle of the second block: one of its files is finished, and another one is written."""
    with preparing(llama, tmp_path, "2:4", FILES_A_BLOCK + 1) as process:
        read_until(process, STOPPED)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    left = packed_files(packed(llama, tmp_path).folder)
    assert [(file.block, file.finished) for file in left] == [(2, True)] * FILES_A_BLOCK
    assert_holds_block(open_packed(llama, tmp_path, 2), llama, torch.float32)


@pytest.mark.slow
def test_a_folder_that_vanishes_while_it_is_written(llama, tmp_path):
    root = tmp_path / "root"
    with preparing(llama, root, "2:4", FILES_A_BLOCK + 1) as process:
        read_until(process, STOPPED)
        shutil.rmtree(root)
        process.stdin.write("\n")
        process.stdin.flush()
        seen = read_until(process, "LEFT []")
    assert f"PackedFileError: the folder for packed weights, {root}, cannot be used (No such file or directory)" in seen
    assert prepare(llama, Span(3, 4), dtype=torch.float32, root=root, plan_of=plan_largest) == [3]


WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@pytest.mark.slow
@pytest.mark.skipif(bool(WITHOUT_PRIVILEGES) and not shutil.which("setpriv"), reason="root may write everywhere")
@pytest.mark.parametrize("place", ["root", "file"])
def test_a_folder_that_may_not_be_read_or_written(llama, tmp_path, place):
    root = tmp_path / "root"
    prepare(llama, Span(2, 3), dtype=torch.float32, root=root, plan_of=plan_largest)
    model = packed(llama, root)
    places = {"root": root, "file": model.files(2, RecordKind.NEURONS).records}
    places[place].chmod(0)
    if place == "file":
        model.folder.chmod(0o500)
    try:
        with preparing(llama, root, "2:3", NEVER, wrapper=WITHOUT_PRIVILEGES) as process:
            seen = read_until(process, "PackedFileError")
    finally:
        places[place].chmod(0o700)
        model.folder.chmod(0o700)
    assert f"the folder for packed weights, {root}, cannot be used (Permission denied)" in seen
    assert_holds_block(open_packed(llama, root, 2), llama, torch.float32)


def test_nothing_is_removed_while_it_is_prepared(llama, tmp_path):
    with preparing(llama, tmp_path, "2:4", FILES_A_BLOCK + 1) as process:
        read_until(process, STOPPED)
        (stored,) = stored_models(tmp_path)
        assert [part.blocks for part in stored.kinds] == [(2,)]
        with pytest.raises(PackedFileError, match=r"are in use: .* or let their preparation end"):
            remove_stored(stored)
        process.stdin.write("\n")
        process.stdin.flush()
        read_until(process, "WRITTEN [2, 3]")
    (stored,) = stored_models(tmp_path)
    remove_stored(stored)
    assert stored_models(tmp_path) == []


@pytest.mark.slow
def test_two_preparations_at_once(llama, tmp_path, caplog):
    """The second one, which is this process, waits, says so, and writes only what the first one did not."""
    with preparing(llama, tmp_path, "1:3", 1) as first, ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        read_until(first, STOPPED)
        second = pool.submit(prepare, llama, Span(2, 4), dtype=torch.float32, root=tmp_path, plan_of=plan_largest)
        wait_until(lambda: "Another process is preparing blocks of llama: waiting until it has" in caplog.text)
        assert not second.done()
        first.stdin.write("\n")
        first.stdin.flush()
        read_until(first, "WRITTEN [1, 2]")
        assert second.result() == [3]
    for block in range(1, 4):
        assert_holds_block(open_packed(llama, tmp_path, block), llama, torch.float32)


@pytest.fixture
def mounts() -> None:
    """Skips the test where file systems cannot be mounted."""
    tried = subprocess.run([*NEW_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip("this machine does not let processes mount file systems")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=1m", "NotEnoughSpace: the packed weights of blocks 2:4 of llama need "),
        pytest.param("size=1m,ro", "PackedFileError: the folder for packed weights, ", marks=pytest.mark.slow),
    ],
)
def test_a_drive_that_cannot_be_written(llama, tmp_path, mounts, options, says):
    mount = f"mount -t tmpfs -o {options} tmpfs {shlex.quote(str(tmp_path))}"
    with preparing(llama, tmp_path, "2:4", NEVER, mount) as process:
        seen = read_until(process, "LEFT []")
    assert says in seen


@pytest.mark.slow
def test_a_drive_that_others_fill_up(llama, tmp_path, mounts):
    """While the second block is written: the first one is kept, and of the second one nothing."""
    mount = f"mount -t tmpfs -o size=70m tmpfs {shlex.quote(str(tmp_path))}"
    with preparing(llama, tmp_path, "2:4", FILES_A_BLOCK, mount) as process:
        read_until(process, STOPPED)
        inside = Path(f"/proc/{process.pid}/root{tmp_path}")
        fill_up(inside)
        process.stdin.write("\n")
        process.stdin.flush()
        names = [f"block-0002.neurons.{part}" for part in ("json", "records", "resident.safetensors")]
        seen = read_until(process, f"LEFT {names}")
    assert "became full in the preparation of block 3 of llama" in seen


def fill_up(folder: Path) -> None:
    with open(folder / "ballast", "wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(1 << 12)):
            pass
    assert not os.statvfs(folder).f_bavail
