"""The terminal of a conversation: line editing, Ctrl-C as a key, and notices in faint text.

During a conversation the terminal passes Ctrl-C on as a character instead of sending SIGINT to the process group. At
the prompt it deletes the line at once; a signal that comes just before `input` begins to wait would only take effect at
the next key. While an answer is generated it interrupts this process alone, not its children.
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

from swarm.common.console import tolerate_missing_characters

PROMPT = "> "
CTRL_C = b"\x03"
_SPECIAL_CHARACTERS = 6
"""Index of the special characters in the attributes of `termios.tcgetattr`."""


class Terminal:
    """Standard input and output, of a person or a program.

    Attributes:
        interactive: whether both are a terminal. If not, only answers go to standard output; notices go to standard
            error.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._faint = self.interactive and "NO_COLOR" not in os.environ
        self._inside_line = False
        tolerate_missing_characters()
        with suppress(AttributeError):
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]

    def lines(self) -> Iterator[str]:
        """The lines of the input."""
        if not self.interactive:
            for line in sys.stdin:
                yield self.readable(line.rstrip("\r\n"), "This line")
            return
        while True:
            try:
                yield self.readable(input(PROMPT), "This line")
            except EOFError:
                sys.stdout.write("\n")
                return

    def readable(self, text: str, what: str) -> str:
        """The text, with U+FFFD for bytes that are not UTF-8. A notice tells of them."""
        given = text.encode(errors="surrogateescape")
        try:
            return given.decode()
        except UnicodeDecodeError:
            self.write_notice(
                f"{what} is not UTF-8; \ufffd stands for what cannot be read. Convert it first, for example with iconv"
            )
            return given.decode(errors="replace")

    def write(self, text: str) -> None:
        """Write text of the answer."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._inside_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Make sure that the next text begins a new line."""
        if self._inside_line:
            self.write("\n")

    def write_notice(self, text: str) -> None:
        """Write text that is not part of the answer, on lines of its own."""
        if not self.interactive:
            print(text, file=sys.stderr, flush=True)
            return
        self.end_line()
        self.write(f"\x1b[2m{text}\x1b[0m\n" if self._faint else f"{text}\n")

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """Inside of the context, lines can be edited, and Ctrl-C is a character."""
        if not self.interactive:
            yield
            return
        import readline  # once it is imported, `input` has line editing and a history

        readline.parse_and_bind('"\\C-c": kill-whole-line')
        with _changed_attributes(special=termios.VINTR):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside of the context, Ctrl-C raises `KeyboardInterrupt` in the main thread, and other keys are ignored."""
        if not self.interactive:
            yield
            return
        end_reader, end_writer = os.pipe()
        watcher = threading.Thread(target=_watch_keys, args=(end_reader,), name="swarm-keys", daemon=True)
        with _changed_attributes(flags=termios.ICANON | termios.ECHO):
            watcher.start()
            try:
                yield
            finally:
                os.close(end_writer)
                watcher.join()
                os.close(end_reader)


@contextmanager
def _changed_attributes(special: int | None = None, flags: int = 0) -> Iterator[None]:
    """Inside of the context, the terminal lacks a special character or some of its local flags."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    after: list[Any] = [
        *before[:3],
        before[3] & ~flags,
        *before[4:_SPECIAL_CHARACTERS],
        list(before[_SPECIAL_CHARACTERS]),
    ]
    if special is not None:
        after[_SPECIAL_CHARACTERS][special] = b"\x00"  # on Linux: no character
    termios.tcsetattr(number, termios.TCSADRAIN, after)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _watch_keys(end_reader: int) -> None:
    """Interrupt the main thread at every Ctrl-C, until the other end of the pipe is closed."""
    keyboard = sys.stdin.fileno()
    main_thread = threading.main_thread().ident
    while True:
        ready, _, _ = select.select([keyboard, end_reader], [], [])
        if end_reader in ready:
            return
        keys = os.read(keyboard, 1024)
        if not keys:
            return
        if CTRL_C in keys and main_thread is not None:
            signal.pthread_kill(main_thread, signal.SIGINT)
