"""The process of a `PromptProcess`: it loads a tokenizer once, and makes each prompt in a process forked from it.

`python -m swarm.models.tokenizers.prompt_worker DESCRIPTOR SOURCE REVISION CACHE_DIR`. It has one thread and no torch,
so that it can be forked quickly; one fork is always ready. It ends when the other end of its control socket is closed.

Control socket: first one report from here, JSON `{"error": TEXT}`; then any number of bytes from there, each with the
descriptor of a socket. On each of these: from here `TAKEN`; from there a request, JSON `{"text"}` or `{"messages",
"tools"}`, until the other side stops sending; then the answer, `{"tokens"}` or `{"refused": TEXT}`. A fork that exceeds
its limits is ended by the kernel, without an answer.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.tokenizers.chat_template import TemplateOptions, conversation_tokens, template_text, text_tokens

LOADING_CPU_S = 120.0
LOADING_MEMORY_BYTES = 2 << 30
"""The largest vocabularies take a few seconds and half a gigabyte."""

PROMPT_CPU_S = 10.0
PROMPT_MEMORY_BYTES = 1 << 30
"""For one prompt, beside the tokenizer. A conversation of two megabytes takes a second and 200 MB."""

RECEIVE_BYTES = 1 << 20

TAKEN, CLOSED = b"+", b"-"
"""What a fork tells the process: that it has taken a connection, or that there will be none. The first also tells the
other side that whatever ends the fork from now on may be the request."""


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the other side stops sending."""
    parts = []
    while part := connection.recv(RECEIVE_BYTES):
        parts.append(part)
    return b"".join(parts)


def limit_process(cpu_s: float, more_bytes: int) -> None:
    """From now on, end this process when it has used so much processor time, and refuse it more memory than this."""
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (present + more_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which kills the process, whatever it is doing


def answer(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    try:
        if "text" in request:
            return {"tokens": text_tokens(tokenizer, request["text"], request["special"])}
        options = TemplateOptions(**request["options"])
        return {"tokens": conversation_tokens(tokenizer, request["messages"], request["tools"], options)}
    except ChatTemplateError as error:
        return {"refused": str(error)}


def _load(source: str, revision: str | None, cache_dir: str | None) -> Any:
    """The tokenizer, with its chat template compiled and tried, so that no fork has to compile it."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed; it would be most of the time and memory
    from swarm.models.tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source, revision, cache_dir)
    if template_text(tokenizer) is not None:
        with suppress(ChatTemplateError):  # it may want something else than a single message
            conversation_tokens(tokenizer, [{"role": "user", "content": "Hello"}])
    return tokenizer


def _serve_one(tokenizer: Any, connection: socket.socket) -> None:
    limit_process(PROMPT_CPU_S, PROMPT_MEMORY_BYTES)
    request = json.loads(read_all(connection))
    connection.sendall(json.dumps(answer(tokenizer, request)).encode())


def _serve(tokenizer: Any, control: socket.socket) -> None:
    """Keep one fork ready, which takes the next connection, until the control socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    gc.freeze()  # what is loaded stays, and is not copied for a fork's garbage collection
    while True:
        told, tell = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                os.close(told)
                status = _take_one(tokenizer, control, tell)
            finally:
                os._exit(status)
        os.close(tell)
        word = os.read(told, 1)  # nothing, if something has ended the fork: the next one takes its place
        os.close(told)
        if word == CLOSED:
            return


def _take_one(tokenizer: Any, control: socket.socket, tell: int) -> int:
    """Take one connection, let the next fork be made, and answer. Returns the exit status."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:
        os.write(tell, CLOSED)
        return 0
    with socket.socket(fileno=descriptors[0]) as connection:
        with suppress(OSError):  # it does not wait for the answer any more
            connection.sendall(TAKEN)
        with suppress(OSError):  # the process that would make the next fork may have been killed
            os.write(tell, TAKEN)
        control.close()
        _serve_one(tokenizer, connection)
    return 0


def main() -> None:
    """Load, report, and serve until the control socket is closed."""
    descriptor, source, revision, cache_dir = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    with socket.socket(fileno=int(descriptor)) as control:
        problem, tokenizer = "", None
        limit_process(LOADING_CPU_S, LOADING_MEMORY_BYTES)
        try:
            tokenizer = _load(source, revision or None, cache_dir or None)
        except CheckpointError as error:
            problem = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        with suppress(OSError):
            control.sendall(json.dumps({"error": problem}).encode())
            if tokenizer is not None:
                _serve(tokenizer, control)


if __name__ == "__main__":
    main()
