"""How long a server takes from its command to "Ready", and what it waits for.

    python -m benchmarks.serving.start [MODEL]

Servers of a swarm of their own start one after the other. Before each, a Python process imports torch and a model of
transformers and nothing else: no server can be faster.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

from benchmarks.common.report import Report, report_parser
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
    parser = report_parser(__doc__)
    parser.add_argument("model", nargs="?", help="folder of a model; the demo model if it is missing")
    arguments = parser.parse_args()
    with Report(arguments) as report:
        measure(arguments.model)  # reads all files from the drive for the first time, and compiles Python's
        for _ in report.rounds():
            for name, seconds in measure(arguments.model).items():
                report.add("seconds", seconds, "less", decides=name == "command to Ready", where=name)


if __name__ == "__main__":
    main()
