"""Real processes that prepare the same model: killed in the middle, or two at once."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import PackedFileError
from swarm.models.flash.files.block_files import packed_files
from tests.models.flash.files.preparations import assert_holds_block, make_checkpoint, open_packed, packed, prepare
from tests.models.flash.files.preparing_process import STOPPED
from tests.models.flash.largest_plan import plan_largest
from tests.slow import slow_except
from tests.waiting import wait_until

FILES_A_BLOCK = 3
NEVER = 1000
"""More files than are written: the process is not stopped."""

NEW_MOUNTS = ("unshare", "--map-root-user", "--mount")


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
