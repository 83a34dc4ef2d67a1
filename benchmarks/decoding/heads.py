"""Speedup of lanes whose output heads are computed together.

    python -m benchmarks.decoding.heads [--width 1024] [--vocabulary 151936] [--lanes 8] [--steps 20]

Threads share a `ComputeLock` as the lanes of a client or the requests of a gateway do: each waits for a reply that is
available at once, then computes its head, with random fp32 weights and one torch thread. Only the head is measured,
alternately with a plain head and with the shared one.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch
from torch import nn

from benchmarks.common.report import Report, report_parser
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
    parser = report_parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = nn.Linear(arguments.width, arguments.vocabulary, bias=False)
    shared = nn.Linear(arguments.width, arguments.vocabulary, bias=False)
    share_head(shared)
    how = arguments.width, arguments.lanes, arguments.steps
    with Report(arguments) as report:
        for _ in report.rounds(f"{arguments.lanes} lanes, head of {arguments.width} x {arguments.vocabulary}, fp32"):
            alone, together = run(plain, *how), run(shared, *how)
            report.add("ms a token, one product a lane", 1e3 * alone)
            report.add("ms a token, together", 1e3 * together, "less")
            report.add("speedup", alone / together, "more", decides=True)


if __name__ == "__main__":
    main()
