"""Speed of this checkout relative to another version of the project, whose swarm runs beside it.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.serving.versions ../before [--servers 1,3] [--clients 8] [--repeats 80]

Both swarms live at the same time and are measured in turn, so that whatever else the machine does affects both. Each
figure is the time there divided by the time here: below 1 this checkout is slower.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

WORKER = Path(__file__).with_name("version_worker.py")
HERE = Path(__file__).parents[2]
MEDIAN_ERROR = 1.25
"""Standard error of a median, in standard errors of the mean."""


class Worker:
    """A process that runs in one checkout."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        self._checkout = checkout
        command = [sys.executable, "-P", str(WORKER), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line. Ends the benchmark if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a process in {self._checkout} has ended early; run {WORKER.name} there to see why")
        return line

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def seconds(clients: Sequence[Worker], prompt: int, new: int) -> float:
    """Time until all clients have written a text at once."""
    began = time.perf_counter()
    for client in clients:
        client.tell(f"{prompt} {new}")
    for client in clients:
        client.hear()
    return time.perf_counter() - began


def compare(there: Callable[[], float], here: Callable[[], float], repeats: int) -> str:
    """Measure in turn; the median of the ratios with its standard error, and the range."""
    there(), here()  # warms up
    ratios = []
    for number in range(repeats):
        if number % 2:
            now = here()
            before = there()
        else:
            before = there()
            now = here()
        ratios.append(before / now)
    error = MEDIAN_ERROR * statistics.stdev(ratios) / math.sqrt(repeats)
    return f"{statistics.median(ratios):.3f} ± {error:.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def measure(checkout: Path, model: str, servers: int, clients: int, repeats: int) -> list[str]:
    """The cells of one chain length."""
    with ExitStack() as stack:
        groups: list[list[Worker]] = []
        for one in (checkout, HERE):
            address = stack.enter_context(Worker(one, "swarm", model, str(servers))).hear()
            group = [stack.enter_context(Worker(one, "client", model, address)) for _ in range(clients)]
            for client in group:
                client.hear()
            groups.append(group)
        there, here = groups

        def row(count: int, prompt: int, new: int) -> str:
            return compare(
                lambda: seconds(there[:count], prompt, new), lambda: seconds(here[:count], prompt, new), repeats
            )

        return [row(1, 16, 48), row(1, 512, 1), row(clients, 16, 24)]


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--servers", default="1,3", show_default=True, help="Chain lengths.")
@click.option("--clients", default=8, show_default=True, help="Clients that write at once.")
@click.option("--repeats", default=80, show_default=True)
def main(checkout: Path, servers: str, clients: int, repeats: int) -> None:
    """Print a table of this checkout's speed divided by that of CHECKOUT."""
    print(f"| servers | a text | first token of 512 | {clients} clients |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with Worker(HERE, "model", folder) as maker:
            model = maker.hear()
        for count in map(int, servers.split(",")):
            cells = measure(checkout.resolve(), model, count, clients, repeats)
            print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
