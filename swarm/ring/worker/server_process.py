"""The server that a worker runs: a child process, which gives all memory back when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swarm.common.processes import bound_command
from swarm.errors import WorkerFailed, sanitize_text

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
"""How long the server may take to leave the ring in order."""

KEPT_LINES = 20
_PEER = re.compile(r"^Peer: (\w+),")
_READY = re.compile(r"^Ready: ")
_NOT_READY = re.compile(r"^Not ready, ")
_ERROR = re.compile(r"^Error: (.+)")


class ServerProcess:
    """A running `swarm server`. Start one with `start`, end it with `stop`.

    Attributes:
        pid: its process id.
        peer_id: its peer id, once it has joined the ring; it has another one after each start.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_obstacle: Callable[[str], None]) -> None:
        self.pid = process.pid
        self.peer_id: str | None = None
        self._process = process
        self._on_obstacle = on_obstacle
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._error: str | None = None
        self._ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        on_obstacle: Callable[[str], None] = lambda line: None,
    ) -> ServerProcess:
        """Start a server.

        Args:
            arguments: of `swarm server`.
            environment: added to this process's own.
            on_obstacle: called with a line that says why a server that runs is not ready.
        """
        process = await asyncio.create_subprocess_exec(
            *bound_command("swarm.server", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "SWARM_LOG_FORMAT": "plain", **environment},
            start_new_session=True,  # Ctrl-C reaches the worker only, which ends its server in order
        )
        return cls(process, on_obstacle)

    async def ready(self) -> str:
        """Wait until clients can use the server; its peer id. Raises `WorkerFailed` if it ends before."""
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({waiting, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self._ready.is_set() or self.peer_id is None:
            raise await self.ended()
        return self.peer_id

    async def ended(self) -> WorkerFailed:
        """Wait until the server has ended; why it did."""
        await asyncio.shield(self._reading)
        code = await self._process.wait()
        if self._error is not None:
            return WorkerFailed(self._error)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        hint = ", perhaps because the device has too little memory" if code == -signal.SIGKILL else ""
        last = f"; its last words: {self._lines[-1]}" if self._lines else ""
        return WorkerFailed(f"the worker's server ended {how}{hint}{last}")

    async def stop(self) -> None:
        """Let it leave the ring and end; it is killed if it does not."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                data = await self._process.stdout.readline()
            except ValueError:  # a line without an end
                continue
            if not data:
                return
            self._note(sanitize_text(data.decode(errors="replace").rstrip("\n")))

    def _note(self, line: str) -> None:
        self._lines.append(line)
        logger.debug("server: %s", line)
        if match := _PEER.search(line):
            self.peer_id = match[1]
        elif match := _ERROR.search(line):
            self._error = match[1]
        elif _READY.search(line):
            self._ready.set()
        elif _NOT_READY.search(line):
            self._on_obstacle(line)
