"""The loop of a conversation in the terminal: reads a line, and shows the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from swarm.cli.chat.conversation import (
    COMMANDS,
    AnswerOptions,
    ChatBackend,
    Conversation,
    InvalidCommand,
    parse_command,
    parse_message,
)
from swarm.cli.chat.reply_pieces import (
    ChatFailed,
    NoticePiece,
    ReplyPiece,
    RoutePiece,
    SummaryPiece,
    TextPiece,
    strip_controls,
)
from swarm.cli.chat.terminal import Terminal
from swarm.errors import SwarmError, UsageError


class Dialogue:
    """One conversation at a terminal.

    Args:
        backend: generates the answers.
        terminal: reads lines and shows answers.
        options: how answers are generated.
        system: instructions for the model; "" for none.
    """

    def __init__(self, backend: ChatBackend, terminal: Terminal, options: AnswerOptions, system: str) -> None:
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
            with self._terminal.working():
                self._backend.answer(conversation.messages, self._options, self._on_piece)
            keep_answer = True
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            keep_answer = stopped = True
        finally:
            self._terminal.end_line()
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
            case SummaryPiece():
                self._terminal.end_line()
                self._terminal.write_notice(format_summary(piece, self._hops))

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidCommand("/save FILE: the name of the file is missing")
        messages = [{"role": message.role, "content": message.content} for message in self.conversation.messages]
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
