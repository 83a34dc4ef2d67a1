"""Speedup of lanes whose output heads are computed together.

    python -m benchmarks.decoding.heads [--width 1024] [--vocabulary 151936] [--lanes 8] [--steps 20]

Threads share a `ComputeLock` as the lanes of a client or the requests of a gateway do: each waits for a reply that is
available at once, then computes its head, with random fp32 weights and one torch thread. Only the head is measured,
alternately with a plain head and with the shared one.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import Future

import torch
from torch import nn

from benchmarks.common import machine
from benchmarks.common.tables import spread
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket, share_head


def run(head: nn.Module, width: int, lanes: int, steps: int) -> float:
    """Seconds per token of all lanes together."""
    lock = ComputeLock()
    answered: Future[None] = Future()
    answered.set_result(None)

    def lane() -> None:
        with torch.no_grad(), ComputeTicket(lock) as ticket:
            for _ in range(steps):
                ticket.wait(answered)
                head(torch.randn(1, 1, width))

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / (lanes * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = nn.Linear(arguments.width, arguments.vocabulary, bias=False)
    shared = nn.Linear(arguments.width, arguments.vocabulary, bias=False)
    share_head(shared)
    times: dict[str, list[float]] = {"one product per lane": [], "together": []}
    for _ in range(arguments.repeats):
        for found, head in zip(times.values(), (plain, shared), strict=True):
            found.append(run(head, arguments.width, arguments.lanes, arguments.steps) * 1e3)
    ratios = [alone / together for alone, together in zip(*times.values(), strict=True)]
    print(", ".join(f"{name} {value}" for name, value in machine.describe().items()), end="\n\n")
    print(f"{arguments.lanes} lanes, head of {arguments.width} x {arguments.vocabulary}, fp32; median (range)\n")
    print("| | ms per token |\n| --- | --- |")
    for name, found in times.items():
        print(f"| {name} | {spread(found)} |")
    print(f"| speedup | {spread(ratios)} |")


if __name__ == "__main__":
    main()
