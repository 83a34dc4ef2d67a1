"""A process that prepares blocks, and stops where a test wants it to.

    python -m tests.models.flash.files.preparing_process CHECKPOINT ROOT START:END FILES

After so many finished files, it prints STOPPED and waits for a line on its standard input. An error is printed, and so
are the files that are left.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from swarm.common import console
from swarm.data_structures import Span
from swarm.errors import UsageError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from tests.models.flash.files.preparations import prepare
from tests.models.flash.largest_plan import plan_largest

STOPPED = "STOPPED"


def main(checkpoint: str, root: str, blocks: str, files: str) -> None:
    console.configure_logging()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    replace, finished = os.replace, []

    def stop_before_replacing(source, target) -> None:
        if len(finished) == int(files):
            print(STOPPED, flush=True)
            sys.stdin.readline()
        finished.append(target)
        replace(source, target)

    os.replace = stop_before_replacing
    span = Span(*map(int, blocks.split(":")))
    try:
        written = prepare(open_checkpoint(checkpoint), span, dtype=torch.float32, root=Path(root), plan_of=plan_largest)
        print(f"WRITTEN {written}", flush=True)
    except UsageError as error:
        print(f"{type(error).__name__}: {error}")
    print(f"LEFT {sorted(path.name for path in Path(root).glob('*/block-*'))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
