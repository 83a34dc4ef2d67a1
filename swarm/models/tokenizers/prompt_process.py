"""From a conversation or a text to tokens, in a process that is ended when it takes too much time or memory.

Chat templates and tokenizers are part of a checkpoint, which may be a stranger's: a template is a program, and the
regular expressions of a tokenizer may take for ever on some texts. `prompt_worker` is the other side.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from swarm.common.processes.python_process import module_command
from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.tokenizers.chat_template import ChatMessage, TemplateOptions, conversation_tokens, text_tokens
from swarm.models.tokenizers.prompt_worker import PROMPT_CPU_S, PROMPT_MEMORY_BYTES, RECEIVE_BYTES, TAKEN

logger = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 600.0
"""Wall-clock limit for loading, which may include a download."""

PROMPT_TIMEOUT_S = 30.0
"""Wall-clock limit for a prompt, for machines that are busy."""

MAX_ANSWER_BYTES = 1 << 26
MAX_REPORT_BYTES = 1 << 16


class PromptMaker(Protocol):
    """Turns conversations and texts into tokens. May be called in several threads."""

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None = None,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """See `chat_template.conversation_tokens`."""

    def text(self, text: str, add_special: bool = True) -> list[int]:
        """See `chat_template.text_tokens`."""

    def close(self) -> None:
        """End what it has started."""


class TokenizerPrompts:
    """Makes prompts in this process, without limits: for a tokenizer that this machine's owner has made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None = None,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        return conversation_tokens(self._tokenizer, messages, tools, options)

    def text(self, text: str, add_special: bool = True) -> list[int]:
        return text_tokens(self._tokenizer, text, add_special)

    def close(self) -> None:
        pass


class PromptProcess:
    """Makes prompts in another process, which begins to load the tokenizer at once; implements `PromptMaker`.

    Args:
        source: local folder or hub id.
        revision: commit of a hub model; ignored for a folder.
        cache_dir: folder for files of the hub.
    """

    def __init__(self, source: str, revision: str | None = None, cache_dir: str | Path | None = None) -> None:
        self._source = source
        self._arguments = (source, revision or "", str(cache_dir or ""))
        self._lock = threading.Lock()
        """Held while the process is started, loaded, told of a connection, or ended."""
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Start a process. Raises `OSError` if the machine cannot."""
        ours, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        with theirs, ExitStack() as on_failure:
            on_failure.callback(ours.close)
            process = subprocess.Popen(
                module_command("swarm.models.tokenizers.prompt_worker", str(descriptor), *self._arguments),
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Without threads of its own, a tokenizer can be forked.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                process_group=0,  # with its forks, so that `close` ends them all, and Ctrl-C none of them
            )
            on_failure.pop_all()
        self._control, self._process = ours, process
        self._loaded = self._ended = False

    def require_loaded(self) -> None:
        """Wait until the tokenizer is loaded.

        Raises:
            CheckpointError: the checkpoint has no usable tokenizer, or loading it exceeds the limits.
        """
        with self._lock:
            self._require_loaded()

    def _require_loaded(self) -> None:
        if self._ended and not self._closed:
            try:
                self._start()
            except OSError as error:
                raise CheckpointError(
                    f"the process that makes prompts for {self._source} cannot be started: {error.strerror}"
                ) from error
        if self._closed:  # looked at after the start: `close` may not have seen what was started
            self._end()
            raise CheckpointError(f"the process that makes prompts for {self._source} is closed")
        if self._loaded:
            return
        self._control.settimeout(LOADING_TIMEOUT_S)
        try:
            report = self._control.recv(MAX_REPORT_BYTES)
            problem = json.loads(report)["error"]
        except (OSError, ValueError):
            problem = (
                f"loading the tokenizer and the chat template of {self._source} took too much time or memory, or "
                "broke down; use a checkpoint from a source that you trust"
            )
        if problem:
            self._end()
            raise CheckpointError(problem)
        self._control.settimeout(None)
        self._loaded = True

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None = None,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """See `PromptMaker`. Raises `ChatTemplateError` also where the limits are exceeded."""
        asked = vars(options) if options is not None else {}
        return self._ask({"messages": list(messages), "tools": tools, "options": asked})

    def text(self, text: str, add_special: bool = True) -> list[int]:
        """See `PromptMaker`. Raises `ChatTemplateError` where the limits are exceeded."""
        return self._ask({"text": text, "special": add_special})

    def close(self) -> None:
        """End the process. Prompts that are being made are refused."""
        self._closed = True
        self._kill_all()  # before the lock is taken: its holder may be waiting for the process
        with self._lock:
            self._end()

    def _kill_all(self) -> None:
        if self._process.returncode is None:  # so that its id is still its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """End the process, but not the forks of it that make prompts now."""
        self._ended = True
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> list[int]:
        try:
            sent = json.dumps(request).encode()
            received = self._exchange(sent) or self._exchange(sent)
            answer = json.loads(received.removeprefix(TAKEN))
        except (OSError, ValueError, RecursionError):  # the last, where tools are nested too deep
            raise ChatTemplateError(
                f"the chat template or the tokenizer of {self._source} cannot make a prompt of this: it needs more "
                f"than {PROMPT_CPU_S:.0f} s or {PROMPT_MEMORY_BYTES >> 20} MiB, or breaks down; send less text"
            ) from None
        if "refused" in answer:
            raise ChatTemplateError(answer["refused"])
        tokens: list[int] = answer["tokens"]
        return tokens

    def _exchange(self, sent: bytes) -> bytes:
        """What a fork sends for a request: `TAKEN`, and the answer if there is one.

        Empty if something ended the fork before, so that it was not this request. Raises `OSError` if the answer is too
        long or too late.
        """
        with self._open() as connection:
            deadline = time.monotonic() + PROMPT_TIMEOUT_S
            connection.settimeout(PROMPT_TIMEOUT_S)
            with suppress(ConnectionError):  # it has ended; what it has sent says when
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
            return _read_answer(connection, deadline)

    def _open(self) -> socket.socket:
        """A connection to a new fork of the process, which is started again if something has ended it."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as on_failure:
            on_failure.callback(ours.close)
            if not self._pass(theirs) and not self._pass(theirs):
                raise CheckpointError(f"the process that makes prompts for {self._source} ends again and again")
            on_failure.pop_all()
        return ours

    def _pass(self, connection: socket.socket) -> bool:
        """Hand a connection to the process. False if that has ended; the next call starts another one."""
        with self._lock:
            self._require_loaded()
            try:
                socket.send_fds(self._control, [b"+"], [connection.fileno()])
            except OSError:
                logger.warning("The process that makes prompts for %s has ended; starting it", self._source)
                self._end()
                return False
        return True


def _read_answer(connection: socket.socket, deadline: float) -> bytes:
    """What arrives until the other side has ended. Raises `OSError` if that is too much or too late."""
    parts: list[bytes] = []
    size = 0
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            part = connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            part = b""  # it has ended without reading all
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise OSError("the answer is too long")
        parts.append(part)
