"""A child process of a benchmark that receives commands and sends results as lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, cast

EXIT_TIMEOUT_S = 10.0


class Worker:
    """Runs `python ARGUMENTS`. The first line of its output says that it is ready."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.receive()

    def send(self, message: Any) -> None:
        """Send a command."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()

    def receive(self) -> Any:
        """Wait for the next line of output."""
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self._process.wait(EXIT_TIMEOUT_S)}; see its output above")
        return json.loads(line)

    def close(self) -> None:
        cast(IO[str], self._process.stdin).close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            cast(IO[str], self._process.stdout).close()


@contextmanager
def start_workers(module: str, arguments: Sequence[str], count: int) -> Iterator[list[Worker]]:
    """Start `python -m MODULE --worker ARGUMENTS NUMBER` so often, one after the other, and end them on exit."""
    with ExitStack() as stack:
        workers = []
        for number in range(count):
            worker = Worker(["-m", module, "--worker", *arguments, str(number)])
            stack.callback(worker.close)
            workers.append(worker)
        yield workers
