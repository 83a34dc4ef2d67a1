"""From a conversation or a text to tokens, in a process that is ended when it takes too much time or memory.

Chat templates and tokenizers are part of a checkpoint, which may be a stranger's: a template is a program, and the
regular expressions of a tokenizer may take forever on some texts. One process loads a tokenizer and makes one prompt
after the other. It answers in JSON, so that nothing that it sends can run code here. Images need torch, which texts
need not wait for: with the first one, another process starts. Behind its answers come the processor's arrays.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from swarm.common.processes import module_command
from swarm.errors import ChatTemplateError, CheckpointError, ImageRefused
from swarm.models.tokenizers.chat_template import (
    ChatMessage,
    TemplateOptions,
    conversation_tokens,
    template_text,
    text_tokens,
)
from swarm.models.tokenizers.image_prompt import MAX_ARRAY_BYTES, image_tokens, load_processor

logger = logging.getLogger(__name__)

LOADING_CPU_S = 120.0
LOADING_TIMEOUT_S = 600.0
"""Wall-clock limit for loading, which may include a download."""

LOADING_MEMORY_BYTES = 2 << 30
"""The largest vocabularies take a few seconds and half a gigabyte."""

PROMPT_CPU_S = 10.0
PROMPT_TIMEOUT_S = 30.0
"""Wall-clock limit for a prompt, for machines that are busy."""

PROMPT_MEMORY_BYTES = 1 << 30
"""For one prompt, beside the tokenizer. A conversation of two megabytes takes a second and 200 MB."""

MAX_ANSWER_BYTES = 1 << 26

FOR_IMAGES = 4
"""How many times as much time and memory a prompt with images may take."""


class PromptProcess:
    """Makes prompts in another process, which begins to load the tokenizer at once. May be used in several threads.

    Args:
        source: local folder or hub id.
        revision: commit of a hub model; ignored for a folder.
        cache_dir: folder for files of the hub.
        images: whether it is the process for conversations with images.
    """

    def __init__(
        self, source: str, revision: str | None = None, cache_dir: str | Path | None = None, images: bool = False
    ) -> None:
        self._source = source
        self._arguments = (source, revision or "", str(cache_dir or ""))
        self._factor = FOR_IMAGES if images else 1
        self._for_images: PromptProcess | None = None
        self._lock = threading.Lock()
        """Held while the process is started, loads, or makes a prompt."""
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Start a process. Raises `OSError` if the machine cannot."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            try:
                # Not a `multiprocessing.Process`, which would import what the working directory holds.
                process = subprocess.Popen(
                    module_command(__name__, str(descriptor), str(self._factor), *self._arguments),
                    pass_fds=(descriptor,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C does not end it
                )
            except OSError:
                ours.close()
                raise
        self._connection, self._process = ours, process
        self._loaded = False

    def require_loaded(self) -> None:
        """Wait until the tokenizer is loaded.

        Raises:
            CheckpointError: the checkpoint has no usable tokenizer, or loading it exceeds the limits.
        """
        with self._lock:
            self._require_loaded()

    def _require_loaded(self) -> None:
        if self._loaded and self._process.poll() is not None and not self._closed:
            logger.warning("The process that makes prompts for %s has ended; starting it", self._source)
            self._end()
        if self._connection.closed and not self._closed:
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
        try:
            problem = self._receive(LOADING_TIMEOUT_S)["error"]
        except (OSError, EOFError, ValueError):
            problem = (
                f"loading the tokenizer and the chat template of {self._source} took too much time or memory, or "
                "broke down; use a checkpoint from a source that you trust"
            )
        if problem:
            self._end()
            raise CheckpointError(problem)
        self._loaded = True

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None = None,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """See `chat_template.conversation_tokens`. Raises `ChatTemplateError` also where the limits are exceeded."""
        return self._conversation(messages, tools, options)[0]

    def conversation_with_images(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, options: TemplateOptions | None
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a conversation with images, and the processor's tensors for these.

        Raises `ImageRefused` if it cannot be used or no image can, else as `conversation`.
        """
        try:
            with self._lock:
                self._require_loaded()
                self._for_images = self._for_images or PromptProcess(*self._arguments, images=True)
            return self._for_images._conversation(messages, tools, options)
        except CheckpointError as error:
            raise ImageRefused(str(error)) from error

    def _conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, options: TemplateOptions | None
    ) -> tuple[list[int], dict[str, Any]]:
        asked = vars(options or TemplateOptions())
        return self._ask({"messages": list(messages), "tools": tools, "options": asked})

    def text(self, text: str, add_special: bool = True) -> list[int]:
        """See `chat_template.text_tokens`. Raises `ChatTemplateError` also where the limits are exceeded."""
        return self._ask({"text": text, "special": add_special})[0]

    def close(self) -> None:
        """End the process. A prompt that is being made is refused."""
        self._closed = True
        self._process.kill()  # before the lock is taken: its holder may be waiting for the process
        with self._lock:
            self._end()
            if self._for_images is not None:
                self._for_images.close()

    def _end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        try:
            sent = json.dumps(request).encode()
            answer = self._exchange(sent)
        except (OSError, EOFError, ValueError, SafetensorError, RecursionError):  # the last: tools nested too deep
            raise ChatTemplateError(
                f"the chat template or the tokenizer of {self._source} cannot make a prompt of this: it needs more "
                f"than {PROMPT_CPU_S * self._factor:.0f} s or {PROMPT_MEMORY_BYTES * self._factor >> 20} MiB, or "
                "breaks down; send less"
            ) from None
        if "refused" in answer:
            raise (ImageRefused if answer["image"] else ChatTemplateError)(answer["refused"])
        return answer["tokens"], answer.get("arrays", {})

    def _exchange(self, sent: bytes) -> dict[str, Any]:
        """The answer to a request. If none is received, another process is started for the next one.

        Raises `OSError`, `EOFError` or `ValueError` if the process has ended, or its answer is too long or too late.
        """
        with self._lock:
            self._require_loaded()
            try:
                self._connection.send_bytes(sent)
                answer = self._receive(PROMPT_TIMEOUT_S * self._factor)
                if "arrays" in answer:
                    from safetensors.torch import load

                    answer["arrays"] = load(self._connection.recv_bytes(MAX_ARRAY_BYTES))
                return answer
            except BaseException:  # Ctrl-C too: a late answer would be taken for that of the next request
                self._end()
                if not self._closed:
                    with suppress(OSError):  # the next request tries again
                        self._start()
                raise

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        received: dict[str, Any] = json.loads(self._connection.recv_bytes(MAX_ANSWER_BYTES))
        return received


def _serve(connection: Connection, factor: int, source: str, revision: str, cache_dir: str) -> None:
    """The other process: load, report, and make prompts until the other end of the connection is closed."""
    load, answer = _load, _text_prompt
    if factor == FOR_IMAGES:
        import torch  # noqa: F401  # before the limits: with a GPU's libraries it is larger than these

        load, answer = load_processor, _image_prompt
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]  # it would be most of the time and memory
    problem, loaded = "", None
    _limit(LOADING_CPU_S, LOADING_MEMORY_BYTES)
    try:
        loaded = load(source, revision, cache_dir)
    except CheckpointError as error:
        problem = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with suppress(EOFError, OSError):
        connection.send_bytes(json.dumps({"error": problem}).encode())
        while loaded is not None:
            request = json.loads(connection.recv_bytes())
            _limit(PROMPT_CPU_S * factor, PROMPT_MEMORY_BYTES * factor)
            for part in _parts(answer, loaded, request):
                connection.send_bytes(part)
            signal.setitimer(signal.ITIMER_PROF, 0)


def _load(source: str, revision: str, cache_dir: str) -> Any:
    """The tokenizer, with its chat template compiled and tried, so that the first request need not wait for that."""
    from swarm.models.tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source, revision, cache_dir)
    if template_text(tokenizer) is not None:
        with suppress(ChatTemplateError):  # it may want something else than a single message
            conversation_tokens(tokenizer, [{"role": "user", "content": "Hello"}])
    return tokenizer


def _limit(cpu_s: float, more_bytes: int) -> None:
    """From now on, end this process when it has used so much processor time, and refuse it more memory than this."""
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (present + more_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which kills the process, whatever it is doing


def _parts(answer: Callable[[Any, dict[str, Any]], list[bytes]], loaded: Any, request: dict[str, Any]) -> list[bytes]:
    """The messages that answer a request."""
    try:
        return answer(loaded, request)
    except ChatTemplateError as error:
        return [json.dumps({"refused": str(error), "image": isinstance(error, ImageRefused)}).encode()]


def _text_prompt(loaded: Any, request: dict[str, Any]) -> list[bytes]:
    if "text" in request:
        tokens = text_tokens(loaded, request["text"], request["special"])
    else:
        options = TemplateOptions(**request["options"])
        tokens = conversation_tokens(loaded, request["messages"], request["tools"], options)
    return [json.dumps({"tokens": tokens}).encode()]


def _image_prompt(loaded: Any, request: dict[str, Any]) -> list[bytes]:
    options = TemplateOptions(**request["options"])
    tokens, arrays = image_tokens(loaded, request["messages"], request["tools"], options)
    return [json.dumps({"tokens": tokens, "arrays": len(arrays)}).encode(), arrays]


def main() -> None:
    """`python -m swarm.models.tokenizers.prompt_process DESCRIPTOR FACTOR SOURCE REVISION CACHE_DIR`."""
    descriptor, factor, *arguments = sys.argv[1:]
    with Connection(int(descriptor)) as connection:
        _serve(connection, int(factor), *arguments)


if __name__ == "__main__":
    main()
