"""The terminal of a conversation: lines with editing, faint notices where they are seen.

Ctrl-C at the prompt takes back what was typed; while somebody waits it is a `KeyboardInterrupt`, as ever.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PROMPT = "> "


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
        import readline  # from here on `input` edits lines and remembers them

        assert readline
        while True:
            try:
                line = input(PROMPT)
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            except EOFError:
                sys.stdout.write("\n")
                return
            yield line

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
    def working(self) -> Iterator[None]:
        """While the person waits: what is typed is for the next prompt, and not shown in the middle of the answer."""
        if not self.interactive:
            yield
            return
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
        termios.tcsetattr(number, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
        try:
            yield
        finally:
            termios.tcsetattr(number, termios.TCSADRAIN, before)
