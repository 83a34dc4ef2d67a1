"""Clients generate continuously while every few seconds a random server is killed and another one started.

    python -m benchmarks.serving.soak [--minutes 10] [--clients 4] [--every 5] [--seed 1] [--picture FILE.png]

Six servers hold each block of the demo model about twice. The server that is killed (`kill -9`) may be the last holder
of a block. Then the clients wait for the new server, which takes 3 to 6 blocks around those that are held least. Every
text is compared with the local model's. The exit code is 1 if a token was wrong, an exception reached a client, or a
process was left behind.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.serving.churn import ChurnResult, MemorySample, growth, make_texts, run_churn
from swarm.transport.p2p import quiet_hivemind

MB = 1 / 2**20


def failures(churn: ChurnResult) -> list[str]:
    """Describe everything that must not happen."""
    wrong = sum(not written.right for written in churn.written if written.error is None)
    return [
        *([f"{wrong} of {len(churn.written)} texts differ from the model's own"] if wrong else []),
        *(f"client {w.client} got an exception:\n{w.error}" for w in churn.written if w.error is not None),
        *([f"processes left behind: {churn.survivors}"] if churn.survivors else []),
    ]


def table(churn: ChurnResult) -> str:
    """Format the results in Markdown."""
    gaps = [gap for written in churn.written for gap in written.gaps[1:]]
    pauses = [gap for written in churn.written for _, gap in written.failovers]
    openings = [written.opening for written in churn.written]
    tokens = sum(written.tokens for written in churn.written)
    seconds = churn.ended - churn.began
    rows = [
        ("seconds", f"{seconds:.0f}"),
        ("texts, all right" if not failures(churn) else "texts", str(len(churn.written))),
        ("tokens", f"{tokens} ({tokens / seconds:.0f} a second)"),
        ("kills", f"{len(churn.kills)}, of them {churn.gaps} of the last holder of a block"),
        ("failovers", str(len(pauses))),
        ("usual time of a token", _spread(gaps)),
        ("pause of a failover", _spread(pauses)),
        ("opening of a session", _spread(openings)),
        *((f"memory of client {number}", _growth(memory)) for number, memory in sorted(churn.clients.items())),
        *(("memory of the server that lived longest", _growth(memory)) for memory in _oldest(churn)),
    ]
    return "\n".join(["| what | how much |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def _growth(memory: Sequence[MemorySample]) -> str:
    first, last = growth(memory)
    daemons = [look.daemon * MB for look in memory if look.daemon] or [0.0]
    minutes = (memory[-1].when - memory[0].when) / 60
    return (
        f"{first * MB:.0f} MB at first, {last * MB:.0f} MB at last, {minutes:.1f} minutes between; "
        f"its daemon {daemons[0]:.0f} and {daemons[-1]:.0f} MB"
    )


def _oldest(churn: ChurnResult) -> list[list[MemorySample]]:
    lives = sorted(churn.servers.values(), key=lambda looks: looks[-1].when - looks[0].when if looks else 0.0)
    return lives[-1:]


def draw(churn: ChurnResult, path: Path) -> None:
    """Pauses and memory over time, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for number, (client, texts) in enumerate(
        itertools.groupby(sorted(churn.written, key=lambda written: written.client), lambda written: written.client)
    ):
        failovers = [failover for written in texts for failover in written.failovers]
        above.plot(
            [when - churn.began for when, _ in failovers],
            [gap for _, gap in failovers],
            "o",
            color=f"C{number}",
            markersize=4,
            label=f"client {client}",
        )
    usual = statistics.median(gap for written in churn.written for gap in written.gaps)
    above.axhline(usual, color="gray", linestyle="--", label="median token")
    for kill in churn.kills:
        above.axvline(kill - churn.began, color="0.88", linewidth=0.8, zorder=0)
    above.set(yscale="log", ylabel="seconds a token took\nin which servers were replaced")
    above.legend(loc="upper right", ncols=3)
    for looks in churn.servers.values():
        below.plot([look.when - churn.began for look in looks], [look.own * MB for look in looks], color="0.75")
    for number, looks in sorted(churn.clients.items()):
        below.plot([look.when - churn.began for look in looks], [look.own * MB for look in looks], color=f"C{number}")
    below.set(xlabel="seconds (a grey line: a kill)", ylabel="MB of its own\n(clients; servers grey)", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="draw pauses and memory over time into this PNG file")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in machine.describe().items()), end="\n\n", flush=True)
    churn = run_churn(60 * arguments.minutes, arguments.clients, arguments.every, arguments.seed, make_texts())
    print(table(churn))
    if arguments.picture is not None:
        draw(churn, arguments.picture)
    if found := failures(churn):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
