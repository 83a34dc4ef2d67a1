"""Progress bars and log lines, on a terminal and on a pipe."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import pytest

from swarm import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(console, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


def test_progress_on_a_terminal(terminal):
    assert list(console.progress(range(3), "Counting", "number")) == [0, 1, 2]
    assert "Counting" in terminal.getvalue()
    assert "0/3" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_nothing_without_a_title(terminal):
    assert list(console.progress(range(3), None, "number")) == [0, 1, 2]
    assert terminal.getvalue() == ""


def test_nothing_on_a_pipe(capsys):
    assert list(console.progress(range(3), "Counting", "number")) == [0, 1, 2]
    with console.progress_bar("Counting", 3, "number") as bar:
        bar.update()
    assert capsys.readouterr().err == ""


def test_a_bar_is_removed_when_its_work_fails(terminal):
    def work() -> None:
        for _ in console.progress(range(3), "Counting", "number"):
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        work()
    assert terminal.getvalue().endswith("\r")


CODE = """
import logging
from swarm import console
console.plain_log_lines()
for number in console.progress(range(3), "Counting", "number"):
    logging.getLogger("swarm.test").info("line %d", number)
"""


def run(stderr: int) -> str:
    """What the code writes to stdout, with stderr going to a file descriptor."""
    return subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=stderr, check=True, text=True
    ).stdout


def test_log_lines_are_whole_lines_beside_a_bar():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1000):
                shown.append(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert run(theirs) == "line 0\nline 1\nline 2\n"
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)
    assert b"Counting" in b"".join(shown)


def test_log_lines_alone_on_a_pipe():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True, text=True)
    assert result.stdout == "line 0\nline 1\nline 2\n"
    assert result.stderr == ""


def test_plain_log_lines_replace_earlier_handlers(monkeypatch):
    logger = logging.getLogger("swarm")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    level = logger.level
    try:
        console.plain_log_lines()
        assert len(logger.handlers) == 1
        assert isinstance(logger.handlers[0], logging.StreamHandler)
    finally:
        logger.setLevel(level)
