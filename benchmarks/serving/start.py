"""How long a server takes from its command to "Ready", and what it waits for.

    python -m benchmarks.serving.start [--repeats 5] [--json FILE] [MODEL]

Servers of a swarm of their own start one after the other. Before each, a Python process imports torch and a model of
transformers and nothing else: no server can be faster.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import machine
from benchmarks.common.tables import spread, table
from swarm.cli.local_swarm import LOOPBACK, PeerProcess

IMPORTS = "import transformers.models.llama.modeling_llama, hivemind"
STARTED = re.compile(r"^Started in [\d.]+ s: (.*)$")


def measure(model: str | None) -> dict[str, float]:
    """Seconds of one start, by what it waits for."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    imported = time.perf_counter()
    arguments = ("swarm.server", *([model] if model else []), "--new-swarm", "--host-maddrs", LOOPBACK)
    server = PeerProcess(arguments)
    try:
        server.wait_for("^Ready:")
        ready = time.perf_counter()
        parts = (part.rsplit(" ", 1) for part in server.wait_for(STARTED)[1].split(", "))
        phases = {name: float(seconds) for name, seconds in parts}
    finally:
        server.stop()
    return {"command to Ready": ready - imported, "torch and transformers alone": imported - began, **phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder of a model; the demo model if it is missing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    about = machine.describe()
    measure(arguments.model)  # reads all files from the drive for the first time, and compiles Python's
    rounds = [measure(arguments.model) for _ in range(arguments.repeats)]
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    rows = [(name, spread([one[name] for one in rounds], 1)) for name in rounds[0]]
    print(table(("", "seconds"), rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "seconds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
