"""Commands that run a module of this project in another Python process, which may end with this one.

    python -m swarm.common.processes MODULE [ARGUMENTS]

runs a module in a process that ends when its parent does, however that ends. Its standard input has to be a pipe that
the parent keeps open and writes nothing to. The kernel closes it with the parent, also where that is killed or crashes
and cannot end what it has started. No other process may inherit the other end of it; with Python's defaults, none does.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

_ROOT = Path(__file__).parents[2]
"""The folder that holds the package. If it is not installed, another process has to be told."""

_RUN = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command for a module.

    Unlike `python -m`, it imports nothing from the working directory. That may be a stranger's checkpoint, with files
    that are named like modules.
    """
    return [sys.executable, "-P", "-c", _RUN, str(_ROOT), module, *arguments]


_STANDARD_INPUT = 0
LEAVE_S = 20.0
"""How long the process may take to leave in order."""


def bound_command(module: str, *arguments: str) -> list[str]:
    """The command for a module, see `module_command`. Start it with a pipe as its standard input."""
    return module_command("swarm.common.processes", module, *arguments)


def _leave_with_parent() -> None:
    while os.read(_STANDARD_INPUT, 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the module that the command line names."""
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
