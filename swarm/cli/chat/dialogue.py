"""A conversation at a terminal: reads a line, and shows the answer.

Ctrl-C stops an answer. The terminal sends it to this process's group only: the libp2p daemon and the process that makes
prompts are not in it. At the prompt the terminal passes it on as a character, which deletes the line at once: a signal
that another thread gets would only take effect at the next key.
"""

from __future__ import annotations

import json
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.chat.conversation import (
    COMMANDS,
    AnswerOptions,
    ChatFailed,
    Conversation,
    InvalidCommand,
    NoticePiece,
    ProgressPiece,
    ReplyPiece,
    RoutePiece,
    SummaryPiece,
    TextPiece,
    parse_command,
    parse_message,
    strip_controls,
)
from swarm.common.console import tolerate_missing_characters
from swarm.errors import SwarmError, UsageError

if TYPE_CHECKING:
    from swarm.cli.chat.swarm_backend import SwarmBackend

PROMPT = "> "


class Terminal:
    """Standard input and output, of a person or a program.

    Attributes:
        interactive: whether both are a terminal. If not, only answers go to standard output; notices go to standard
            error.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._faint = self.interactive and "NO_COLOR" not in os.environ
        self._inside_line = self._shows_progress = False
        tolerate_missing_characters()
        with suppress(AttributeError):
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]

    def lines(self) -> Iterator[str]:
        """The lines of the input."""
        if not self.interactive:
            for line in sys.stdin:
                yield self.readable(line.rstrip("\r\n"), "This line")
            return
        import readline  # once it is imported, `input` has line editing and a history

        readline.parse_and_bind('"\\C-c": kill-whole-line')
        while True:
            try:
                with _ctrl_c_as_character():
                    line = input(PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return
            yield self.readable(line, "This line")

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
            sys.stdout.write("\r\x1b[K" + text if self._shows_progress else text)
            self._shows_progress = False
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
        self.write(self._fainter(text) + "\n")

    def write_progress(self, text: str) -> None:
        """Write text that the next text replaces."""
        if not self.interactive:
            self.write_notice(text)
            return
        self.write(self._fainter(text))
        self._inside_line, self._shows_progress = False, True

    def _fainter(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._faint else text

    def discard_input(self) -> None:
        """Forget what was typed before the prompt."""
        if self.interactive:
            termios.tcflush(sys.stdin, termios.TCIFLUSH)


@contextmanager
def _ctrl_c_as_character() -> Iterator[None]:
    """Inside of the context, Ctrl-C sends no signal."""
    before = termios.tcgetattr(sys.stdin)
    after = [*before[:-1], [*before[-1]]]
    after[-1][termios.VINTR] = b"\x00"  # on Linux: no character
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, after)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Dialogue:
    """One conversation at a terminal.

    Args:
        backend: generates the answers.
        terminal: reads lines and shows answers.
        options: how answers are generated.
        system: instructions for the model; "" for none.
    """

    def __init__(self, backend: SwarmBackend, terminal: Terminal, options: AnswerOptions, system: str) -> None:
        self.conversation = Conversation(system)
        self._backend = backend
        self._terminal = terminal
        self._options = options
        self._text: list[str] = []
        self._hops: tuple[str, ...] = ()

    def run(self) -> None:
        """Run until the input ends, or /quit. If the input is not a terminal, the first error is raised."""
        if self._terminal.interactive:
            self._terminal.write_notice(
                f"{strip_controls(self._backend.model)}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
            )
        for line in self._terminal.lines():
            try:
                if not self._handle_line(line):
                    return
            except SwarmError as error:
                if not self._terminal.interactive:
                    raise error if isinstance(error, UsageError) else ChatFailed(strip_controls(str(error))) from error
                self._terminal.write_notice(f"Error: {strip_controls(str(error))}")
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise

    def _handle_line(self, line: str) -> bool:
        """Answer a message or carry out a command; False if the conversation ends."""
        if not line.strip():
            return True
        command = parse_command(line.strip())
        if command is None:
            self._ask(self.conversation.with_question(parse_message(line.strip())))
            return True
        name, argument = command
        match name:
            case "quit":
                return False
            case "help":
                self._terminal.write_notice("\n".join(f"/{name:<7} {meaning}" for name, meaning in COMMANDS.items()))
            case "clear":
                self.conversation = Conversation(self.conversation.system)
            case "system":
                self.conversation = replace(self.conversation, system=argument)
            case "retry":
                self._ask(self.conversation.without_last_answer())
            case "save":
                self._save(argument)
            case "route":
                self._terminal.write_notice("\n".join(self._hops) or "there is no answer yet")
        return True

    def _ask(self, conversation: Conversation) -> None:
        """Ask the model, and show the answer as it comes. A stopped answer is kept as far as it came."""
        self._text, self._hops = [], ()
        keep_answer = stopped = False
        try:
            self._backend.answer(conversation.messages, self._options, self._on_piece)
            keep_answer = True
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            keep_answer = stopped = True
        finally:
            self._terminal.end_line()
            self._terminal.discard_input()
            if keep_answer or self._text:
                self.conversation = conversation.with_answer("".join(self._text))
        if stopped:
            self._terminal.write_notice("stopped; /retry answers again")

    def _on_piece(self, piece: ReplyPiece) -> None:
        match piece:
            case TextPiece(text):
                self._text.append(text)
                self._terminal.write(text)
            case RoutePiece(hops):
                self._hops = hops
            case NoticePiece(text):
                self._terminal.write_notice(text)
            case ProgressPiece(text):
                self._terminal.write_progress(text)
            case SummaryPiece():
                self._terminal.end_line()
                self._terminal.write_notice(format_summary(piece, self._hops))

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidCommand("/save FILE: the name of the file is missing")
        messages = self.conversation.messages
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise InvalidCommand(f"{path} exists; choose another name") from None
        except (OSError, ValueError) as error:  # the latter, of a zero byte in the name
            raise InvalidCommand(f"{path} cannot be written: {getattr(error, 'strerror', error)}") from None
        self._terminal.write_notice(f"{path}: {len(messages)} messages")


def format_summary(summary: SummaryPiece, hops: tuple[str, ...]) -> str:
    """The line below an answer."""
    rate = f", {summary.tokens_per_second:.1f} tokens/s" if summary.tokens_per_second is not None else ""
    route = f" · {' → '.join(hops)}" if hops else ""
    count = "1 token" if summary.tokens == 1 else f"{summary.tokens} tokens"
    return f"{count} in {summary.seconds:.1f} s{rate}{route}"
