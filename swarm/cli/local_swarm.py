"""Runs a whole swarm on this machine: a bootstrap peer and servers, each its own process, on loopback.

Used by the demo, by benchmarks, and for experiments.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from swarm.common.processes import bound_command
from swarm.errors import SwarmError

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
_JOIN_LINE = re.compile(r"^Join:.*--initial-peers (\S+)")


class PeerProcess:
    """One command of this package, running as a child process. Its output is kept line by line.

    It ends with this process, also if that is killed (see `bound_process`).

    Args:
        arguments: what follows `python -m`, such as `swarm.server --new-swarm`.
        environment: added to this process's own environment.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.arguments = tuple(arguments)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            bound_command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "SWARM_LOG_FORMAT": "plain",
                "SWARM_INITIAL_PEERS": "",  # it is a swarm of its own
                **(environment or {}),
            },
            start_new_session=True,  # Ctrl-C reaches the parent only, which then ends its children in order
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

    def wait_for(self, pattern: str | re.Pattern[str], timeout: float = START_TIMEOUT_S) -> re.Match[str]:
        """Wait for the first line that matches. Raises `SwarmError`, with the output, on exit or timeout."""
        found: list[re.Match[str]] = []
        compiled = re.compile(pattern)

        def ready() -> bool:
            found[:] = [match for line in self.lines if (match := compiled.search(line))]
            return bool(found) or self._ended

        with self._changed:
            self._changed.wait_for(ready, timeout)
        if not found:
            state = "ended" if self._ended else f"printed no line that matches {compiled.pattern!r} in {timeout:.0f} s"
            output = "\n  ".join(self.lines[-20:])
            raise SwarmError(f"python -m {' '.join(self.arguments)} {state}:\n  {output}")
        return found[0]

    def address(self) -> str:
        """Wait until the process is ready; returns the multiaddress that other peers join by."""
        return self.wait_for(_JOIN_LINE)[1]

    def stop(self) -> int:
        """End the process with SIGTERM, or with SIGKILL after a timeout. Returns its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End the process with SIGKILL, as abruptly as a power cut."""
        self._process.kill()
        self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, and kill it after `timeout` seconds. Returns its exit code."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return self._process.returncode


class LocalSwarm:
    """A bootstrap peer and one server for each entry of `blocks`: a context manager that ends what it started.

    Args:
        model: local folder or hub id; None for the demo model.
        blocks: `--blocks` of each server, such as ("0:4", "4:8").
        options: further options of every server.
        environment: added to every process's environment.
        on_start: called with a line of text as processes start.
    """

    def __init__(
        self,
        model: str | None,
        blocks: Sequence[str],
        *,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        on_start: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.servers: list[PeerProcess] = []
        self.bootstrap: PeerProcess | None = None
        self._model = model
        self._blocks = tuple(blocks)
        self._options = tuple(options)
        # A folder for the temporary files of all processes: a process that is killed cannot remove its own.
        self._temporary = tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True)
        self._environment = {"TMPDIR": self._temporary.name, **(environment or {})}
        self._on_start = on_start

    @property
    def address(self) -> str:
        """The multiaddress that clients join by."""
        if self.bootstrap is None:
            raise SwarmError("the swarm is not running")
        return self.bootstrap.address()

    def __enter__(self) -> LocalSwarm:
        with ExitStack() as undo:
            undo.callback(self.stop)
            arguments = ("swarm.dht", "--host-maddrs", LOOPBACK)
            self.bootstrap = PeerProcess(arguments, self._environment)
            self._on_start(f"bootstrap peer: {self.bootstrap.address()}")
            for blocks in self._blocks:
                self.add_server(blocks)
            for server in self.servers:
                server.address()
            undo.pop_all()
        return self

    def add_server(self, blocks: str, *options: str) -> PeerProcess:
        """Start one more server. Call its `address()` to wait until it serves."""
        model = (self._model,) if self._model is not None else ()
        where = ("--initial-peers", self.address, "--host-maddrs", LOOPBACK)
        arguments = ("swarm.server", *model, "--blocks", blocks, *where, *self._options, *options)
        self.servers.append(PeerProcess(arguments, self._environment))
        return self.servers[-1]

    def stop(self) -> None:
        """End all processes at once, wait for them, and remove their temporary files."""
        processes = [*self.servers, *([self.bootstrap] if self.bootstrap is not None else [])]
        for process in processes:
            if process._process.poll() is None:
                process._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        self._temporary.cleanup()

    def __exit__(self, *exception: object) -> None:
        self.stop()
