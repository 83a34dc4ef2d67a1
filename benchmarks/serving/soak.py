"""Clients generate continuously while every few seconds a random server is killed and another one started.

    python -m benchmarks.serving.soak [--minutes 10] [--clients 4] [--every 5] [--seed 1] [--picture FILE.png]

Six servers hold each block of the demo model about twice; two more are never killed. The server that is killed
(`kill -9`) may be the last holder of a block. Then the clients wait for the new server, which takes 3 to 6 blocks
around those that are held least. Every text is compared with the local model's.

The exit code is 1 if a token was wrong, an exception reached a client, a client took a living server to have failed,
a process was left behind, or, in a run of half an hour or more, a peer grew by more than 5 MB after its warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from benchmarks.common.peer_memory import WARM_UP_S
from benchmarks.serving.churn import ChurnResult, run_churn
from benchmarks.serving.churn_client import make_texts
from swarm.transport.p2p import quiet_hivemind

MB = 1 / 2**20
MAX_GROWTH_BYTES = 5 * 2**20
LONG_LIFE_S = 3 * WARM_UP_S
"""A peer's growth is judged if it lived so long."""


def failures(churn: ChurnResult) -> list[str]:
    """Describe everything that must not happen."""
    wrong = sum(not written.right for written in churn.written if written.error is None)
    return [
        *([f"{wrong} of {len(churn.written)} texts differ from the model's own"] if wrong else []),
        *(f"client {w.client} got an exception:\n{w.error}" for w in churn.written if w.error is not None),
        *([f"living servers were taken to have failed: {_reasons(churn)}"] if churn.wrong_bans else []),
        *([f"processes left behind: {churn.survivors}"] if churn.survivors else []),
        *(
            f"{name} grew by {memory.growth().bytes * MB:.1f} MB, of which {MAX_GROWTH_BYTES * MB:.0f} are allowed"
            for name, memory in churn.memory.items()
            if memory.life_s >= LONG_LIFE_S and memory.growth().bytes > MAX_GROWTH_BYTES
        ),
    ]


def table(churn: ChurnResult) -> str:
    """Format the results in Markdown."""
    gaps = [gap for written in churn.written for gap in written.gaps[1:]]
    pauses = [gap for written in churn.written for _, gap in written.failovers]
    openings = [written.opening for written in churn.written]
    tokens = sum(written.tokens for written in churn.written)
    bans = sum(len(written.bans) for written in churn.written)
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
        (
            "bans",
            f"{bans}, of them {len(churn.wrong_bans)} of living servers"
            + f" ({_reasons(churn)})" * bool(churn.wrong_bans),
        ),
    ]
    return "\n".join(["| what | how much |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def memory_table(churn: ChurnResult) -> str:
    """Format the memory of the peers that lived throughout, in Markdown."""
    rows = ["| MB | after the warm-up | at the end | grown | minutes between | its daemon |", "| --- " * 6 + "|"]
    for name, memory in churn.memory.items():
        own, daemon = memory.growth(), memory.daemon_growth()
        rows.append(
            f"| {name} | {own.first * MB:.1f} | {own.last * MB:.1f} | {own.bytes * MB:+.1f} | {own.seconds / 60:.0f} "
            f"| {daemon.first * MB:.1f} to {daemon.last * MB:.1f} |"
        )
    return "\n".join(rows)


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def _reasons(churn: ChurnResult) -> str:
    """How often living servers were banned for which reason."""
    counts = Counter(ban.reason for ban in churn.wrong_bans)
    return ", ".join(f"{reason.value}: {count}" for reason, count in counts.most_common())


def draw(churn: ChurnResult, path: Path) -> None:
    """Pauses and memory over time, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    pauses, memory, daemons = figure.subplots(3, sharex=True, height_ratios=[3, 3, 2])
    _draw_pauses(churn, pauses)
    for number, (name, peer) in enumerate(churn.memory.items()):
        minutes = [(sample.when - churn.began) / 60 for sample in peer.samples]
        memory.plot(minutes, [sample.own * MB for sample in peer.samples], color=f"C{number}", label=name)
        daemons.plot(minutes, [sample.daemon * MB for sample in peer.samples], color=f"C{number}")
    memory.set(ylabel="MB of a peer's own", ylim=(0, None))
    memory.legend(loc="center", ncols=4)
    daemons.set(ylabel="MB of its daemon", xlabel="minutes", ylim=(0, None))
    figure.savefig(path, dpi=110)


def _draw_pauses(churn: ChurnResult, axes: Any) -> None:
    by_client = itertools.groupby(sorted(churn.written, key=lambda one: one.client), lambda one: one.client)
    for client, texts in by_client:
        failovers = [failover for written in texts for failover in written.failovers]
        minutes = [(when - churn.began) / 60 for when, _ in failovers]
        axes.plot(minutes, [gap for _, gap in failovers], "o", color=f"C{client}", markersize=3)
    usual = statistics.median(gap for written in churn.written for gap in written.gaps)
    axes.axhline(usual, color="gray", linestyle="--", label="median token")
    axes.vlines(
        [(kill - churn.began) / 60 for kill in churn.kills],
        0,
        0.03,
        color="0.4",
        linewidth=0.5,
        transform=axes.get_xaxis_transform(),
        label="a kill",
    )
    axes.set(yscale="log", ylabel="seconds a token took\nin which servers were replaced")
    axes.legend(loc="upper right")


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
    print(table(churn), memory_table(churn), sep="\n\n")
    if arguments.picture is not None:
        draw(churn, arguments.picture)
    if found := failures(churn):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
