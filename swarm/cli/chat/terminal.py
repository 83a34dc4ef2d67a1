"""The terminal of a conversation: lines with editing, Ctrl-C as a key, faint notices where they are seen.

While a conversation lasts the terminal hands Ctrl-C on as a character: at the prompt it empties the line, at once (a
signal that comes just before `input` begins to wait is heard at the next key only), and while somebody waits for an
answer it interrupts this process alone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PROMPT = "> "
CTRL_C = b"\x03"
_SPECIAL = 6
"""Place of the special characters in what termios tells of a terminal."""


class Terminal:
    """Standard input and output, a person's or a program's.

    Attributes:
        interactive: whether a person sits there. If not, only answers go to standard output, notices to standard error.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._faint = self.interactive and "NO_COLOR" not in os.environ
        self._inside_line = False
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    def lines(self) -> Iterator[str]:
        """What is entered, line by line, until the end of the input."""
        if not self.interactive:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
            return
        while True:
            try:
                yield input(PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return

    def write(self, text: str) -> None:
        """The answer goes on."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._inside_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._inside_line:
            self.write("\n")

    def tell(self, text: str) -> None:
        """Something beside the answer, on lines of its own."""
        if not self.interactive:
            print(text, file=sys.stderr, flush=True)
            return
        self.end_line()
        self.write(f"\x1b[2m{text}\x1b[0m\n" if self._faint else f"{text}\n")

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """While a conversation lasts: editing of lines, and Ctrl-C as a character."""
        if not self.interactive:
            yield
            return
        import readline  # from here on `input` edits lines and remembers them

        readline.parse_and_bind('"\\C-c": kill-whole-line')
        with _changed(special=termios.VINTR):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """While the person waits: Ctrl-C raises `KeyboardInterrupt` in the main thread, other keys mean nothing."""
        if not self.interactive:
            yield
            return
        told, tell = os.pipe()
        watching = threading.Thread(target=_watch_keys, args=(told,), name="swarm-keys", daemon=True)
        with _changed(flags=termios.ICANON | termios.ECHO):
            watching.start()
            try:
                yield
            finally:
                os.close(tell)
                watching.join()
                os.close(told)


@contextmanager
def _changed(special: int | None = None, flags: int = 0) -> Iterator[None]:
    """The terminal without a special character, or without some of its local flags."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    after: list[Any] = [*before[:3], before[3] & ~flags, *before[4:_SPECIAL], list(before[_SPECIAL])]
    if special is not None:
        after[_SPECIAL][special] = b"\x00"  # what stands for none on Linux
    termios.tcsetattr(number, termios.TCSADRAIN, after)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _watch_keys(told: int) -> None:
    """Interrupt the main thread at every Ctrl-C, until the other end of the pipe `told` is closed."""
    keyboard = sys.stdin.fileno()
    main = threading.main_thread().ident
    while True:
        ready, _, _ = select.select([keyboard, told], [], [])
        if told in ready:
            return
        keys = os.read(keyboard, 1024)
        if not keys:
            return
        if CTRL_C in keys and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
