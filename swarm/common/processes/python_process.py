"""Commands that run a module of this project in another Python process."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
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
