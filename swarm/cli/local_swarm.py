"""A whole swarm on this machine: a bootstrap peer and servers, each a process of its own, on loopback.

For the demo, for benchmarks, and for trying things out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from swarm.errors import SwarmError

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_TIMEOUT = 120.0
STOP_TIMEOUT = 6.0
_JOIN = re.compile(r"^Join:.*--initial-peers (\S+)")


class PeerProcess:
    """One command of this package, running as a process. Its output is kept line by line.

    Args:
        arguments: what follows `python`, such as `-m swarm.server --new-swarm`.
        environment: added to this process's own.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.arguments = tuple(arguments)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "SWARM_LOG_FORMAT": "plain", **(environment or {})},
            start_new_session=True,  # Ctrl-C goes to the parent alone, which then ends its children in order
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str | re.Pattern[str], timeout: float = START_TIMEOUT) -> re.Match[str]:
        """The first line that matches. Raises `SwarmError`, with the output, if the process ends or time runs out."""
        found: list[re.Match[str]] = []
        compiled = re.compile(pattern)

        def ready() -> bool:
            found[:] = [match for line in self.lines if (match := compiled.search(line))]
            return bool(found) or self._ended

        with self._changed:
            self._changed.wait_for(ready, timeout)
        if not found:
            state = "ended" if self._ended else f"said nothing of the kind within {timeout:.0f} s"
            output = "\n  ".join(self.lines[-20:])
            raise SwarmError(f"python {' '.join(self.arguments)} {state}:\n  {output}")
        return found[0]

    def address(self) -> str:
        """The multiaddress that others join by, once the process is ready."""
        return self.wait_for(_JOIN)[1]

    def stop(self) -> int:
        """Ask the process to leave, insist after a while, and return its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(STOP_TIMEOUT)

    def kill(self) -> None:
        """End the process as a power cut would."""
        self._process.kill()
        self.wait(STOP_TIMEOUT)

    def wait(self, timeout: float) -> int:
        """Wait for the end, killing the process when time runs out; the exit code."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.returncode


class LocalSwarm:
    """A bootstrap peer and one server for each entry of `blocks`; a context manager that ends what it started.

    Args:
        model: local folder or hub id; None for the demo model.
        blocks: `--blocks` of each server, such as ("0:4", "4:8").
        options: further options of every server.
        environment: added to every process's environment.
        starting: called with a line of text while the processes start.
    """

    def __init__(
        self,
        model: str | None,
        blocks: Sequence[str],
        *,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        starting: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.servers: list[PeerProcess] = []
        self.bootstrap: PeerProcess | None = None
        self._model = model
        self._blocks = tuple(blocks)
        self._options = tuple(options)
        # Of its own, because whoever is killed cannot remove what is in it.
        self._temporary = tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True)
        self._environment = {"TMPDIR": self._temporary.name, **(environment or {})}
        self._starting = starting

    @property
    def address(self) -> str:
        """Where clients join."""
        if self.bootstrap is None:
            raise SwarmError("the swarm is not running")
        return self.bootstrap.address()

    def __enter__(self) -> LocalSwarm:
        try:
            arguments = ("-m", "swarm.dht", "--host-maddrs", LOOPBACK)
            self.bootstrap = PeerProcess(arguments, self._environment)
            self._starting(f"bootstrap peer: {self.bootstrap.address()}")
            for blocks in self._blocks:
                self.add_server(blocks)
            for server in self.servers:
                server.address()
        except BaseException:
            self.stop()
            raise
        return self

    def add_server(self, blocks: str, *options: str) -> PeerProcess:
        """Start one more server; call `address()` on it to wait until it serves."""
        model = (self._model,) if self._model is not None else ()
        where = ("--initial-peers", self.address, "--host-maddrs", LOOPBACK)
        arguments = ("-m", "swarm.server", *model, "--blocks", blocks, *where, *self._options, *options)
        self.servers.append(PeerProcess(arguments, self._environment))
        return self.servers[-1]

    def stop(self) -> None:
        """End all processes: all are asked at once, then waited for. What they left is removed."""
        everyone = [*self.servers, *([self.bootstrap] if self.bootstrap is not None else [])]
        for process in everyone:
            if process._process.poll() is None:
                process._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in everyone:
            process.wait(max(0.1, deadline - time.monotonic()))
        self._temporary.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
