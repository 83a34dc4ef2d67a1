"""The loop of a conversation: a line comes, an answer goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from swarm.cli.chat.conversation import COMMANDS, Conversation, NotPossible, Talk, Wishes, command_of, message_of
from swarm.cli.chat.reply_stream import ChatFailed, Done, Hops, Notice, Piece, Text, inert
from swarm.cli.chat.terminal import Terminal
from swarm.errors import SwarmError, UsageError


class Dialogue:
    """One conversation at a terminal.

    Args:
        talk: who answers.
        terminal: where the person sits.
        wishes: how answers are chosen.
        system: how the model shall behave.
    """

    def __init__(self, talk: Talk, terminal: Terminal, wishes: Wishes, system: str) -> None:
        self.conversation = Conversation(system)
        self._talk = talk
        self._terminal = terminal
        self._wishes = wishes
        self._text: list[str] = []
        self._hops: tuple[str, ...] = ()

    def run(self) -> None:
        """Until the input ends, or /quit. Where no person sits, the first failure is raised."""
        if self._terminal.interactive:
            self._terminal.tell(
                f"{inert(self._talk.model)}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."
            )
        for line in self._terminal.lines():
            try:
                if not self._take(line):
                    return
            except SwarmError as error:
                if not self._terminal.interactive:
                    raise error if isinstance(error, UsageError) else ChatFailed(inert(str(error))) from error
                self._terminal.tell(f"Error: {inert(str(error))}")
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise

    def _take(self, line: str) -> bool:
        """Do what a line says; False if it says that this is the end."""
        if not line.strip():
            return True
        command = command_of(line.strip())
        if command is None:
            self._ask(self.conversation.asked(message_of(line.strip())))
            return True
        name, rest = command
        match name:
            case "quit":
                return False
            case "help":
                self._terminal.tell("\n".join(f"/{name:<7} {meaning}" for name, meaning in COMMANDS.items()))
            case "clear":
                self.conversation = Conversation(self.conversation.system)
            case "system":
                self.conversation = replace(self.conversation, system=rest)
            case "retry":
                self._ask(self.conversation.again())
            case "save":
                self._save(rest)
            case "route":
                self._terminal.tell("\n".join(self._hops) or "no answer has come yet")
        return True

    def _ask(self, conversation: Conversation) -> None:
        """Ask, and show the answer as it comes. An answer that is stopped counts as far as it came."""
        self._text, self._hops = [], ()
        counts = stopped = False
        try:
            with self._terminal.working():
                self._talk.answer(conversation.messages, self._wishes, self._hear)
            counts = True
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            counts = stopped = True
        finally:
            self._terminal.end_line()
            if counts or self._text:
                self.conversation = conversation.answered("".join(self._text))
        if stopped:
            self._terminal.tell("stopped; /retry asks again")

    def _hear(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self._text.append(text)
                self._terminal.write(text)
            case Hops(hops):
                self._hops = hops
            case Notice(text):
                self._terminal.tell(text)
            case Done():
                self._terminal.end_line()
                self._terminal.tell(footer(piece, self._hops))

    def _save(self, name: str) -> None:
        if not name:
            raise NotPossible("/save FILE: say where to")
        messages = [{"role": one.role, "content": one.content} for one in self.conversation.messages]
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise NotPossible(f"{path} exists; choose another name") from None
        except OSError as error:
            raise NotPossible(f"{path} cannot be written: {error.strerror}") from None
        self._terminal.tell(f"{path}: {len(messages)} messages")


def footer(done: Done, hops: tuple[str, ...]) -> str:
    """The line below an answer."""
    rate = f", {done.tokens_per_second:.1f} tokens/s" if done.tokens_per_second is not None else ""
    way = f" · {' → '.join(hops)}" if hops else ""
    count = "1 token" if done.tokens == 1 else f"{done.tokens} tokens"
    return f"{count} in {done.seconds:.1f} s{rate}{way}"
