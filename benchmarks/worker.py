"""A process of a benchmark that is told by lines of JSON what to do, and answers with lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, cast

END = 10.0
"""Seconds that it gets to leave."""


class Worker:
    """Runs `python ARGUMENTS`, whose first line says that it is ready."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hear()

    def tell(self, what: Any) -> None:
        """Let it begin with something."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()

    def hear(self) -> Any:
        """What it says next."""
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self._process.wait(END)}; what it said stands above")
        return json.loads(line)

    def close(self) -> None:
        cast(IO[str], self._process.stdin).close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
