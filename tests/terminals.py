"""Commands at a pseudo-terminal, as a person sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LINE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\x07")
"""What readline and we write to move, and to make faint."""


class Screen:
    """The person's side of a terminal.

    Attributes:
        seen: everything that was written, without what a terminal obeys.
    """

    def __init__(self, keyboard: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.raw = b""
        self._keyboard = keyboard
        self._read = 0

    @property
    def seen(self) -> str:
        return LINE.sub("", self.raw.decode(errors="replace")).replace("\r", "")

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode(errors="surrogateescape"))

    def wait_for(self, pattern: str, seconds: float = 300.0) -> re.Match[str]:
        """The next match behind the last one."""
        deadline = time.monotonic() + seconds
        while (found := re.compile(pattern).search(self.seen, self._read)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.seen[self._read :]!r}"
            assert self._more(), f"ended before {pattern!r}: {self.seen[self._read :]!r}"
        self._read = found.end()
        return found

    def wait_end(self) -> int:
        """The exit code."""
        while self._more():
            pass
        return self.process.wait(60)

    def _more(self) -> bool:
        if not select.select([self._keyboard], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self.raw += data
        return bool(data)


def _become_foreground() -> None:
    """Make standard input the controlling terminal, and let its keys interrupt.

    A process that a shell starts in the background ignores SIGINT and SIGQUIT, under nohup SIGHUP too, and so do its
    children: pytest's own may be such ones.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def at_terminal(arguments: Sequence[str], **environment: str) -> Iterator[Screen]:
    """`python ARGUMENTS` at a terminal of its own, as its foreground process group. It ends with the block."""
    keyboard, screen = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env={**os.environ, "TERM": "xterm", **environment},
        start_new_session=True,
        preexec_fn=_become_foreground,
    )
    os.close(screen)
    try:
        yield Screen(keyboard, process)
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
