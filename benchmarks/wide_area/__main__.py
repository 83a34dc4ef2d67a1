"""Texts over servers that are far apart: what speculative decoding gains, and how near that is to what is possible.

    python -m benchmarks.wide_area [--servers 4] [--delay 0.05] [--right 0,0.5,0.8,0.95,1] [--tokens 200] [--repeats 3]
    python -m benchmarks.wide_area --profile benchmarks/wide_area/profiles/*.json [--right 0.8]

A planted draft is right with a probability, and does not know when. The bound is what a text could have if a wrong
guess cost one way through all servers, as a token without guesses does, and everything else flowed at the rate of the
slowest stage, as where all guesses are right. It counts the guesses that did stand, because they are few. First on a
virtual clock, where the servers' times are given; then the demo model over real libp2p processes on this machine, whose
streams deliver everything with the delay. With --profile, the links are those of these files instead, and guesses that
stream are compared with none, and with blocks of guesses that wait for each other. All texts are compared with the
local model's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.common.tables import spread, table
from benchmarks.wide_area.planted_texts import DEMO_BLOCKS, PlantedTexts, over_profile
from benchmarks.wide_area.virtual import Chain, generate, planted
from swarm.client.routes.events import GuessVerified
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind

HEADING = ("draft is right", "tokens/s", "times plain", "of the bound", "guesses that stood")


def on_virtual_clock(chain: Chain, rights: Sequence[float], tokens: int, repeats: int) -> str:
    """A table for servers on a virtual clock."""
    plain = generate(chain, tokens, lambda swarm: []).rate
    rows = [("no draft", f"{plain:.2f}", "1.00", f"{plain * chain.round_s:.2f}", "")]
    for right in rights:
        found = [planted(chain, right, tokens, seed) for seed in range(repeats)]
        rates = [one.rate for one in found]
        bounds = [one.rate / chain.bound(one.stood) for one in found]
        stood = statistics.mean(one.stood for one in found)
        times = spread([rate / plain for rate in rates])
        rows.append((f"{right:g}", spread(rates), times, spread(bounds), f"{stood:.2f}"))
    return table(HEADING, rows)


class _Outcomes:
    """Counts the guesses of a session."""

    def __init__(self) -> None:
        self.stood = self.verified = 0

    def __call__(self, event: Any) -> None:
        if isinstance(event, GuessVerified):
            self.verified += 1
            self.stood += event.stands


def over_libp2p(servers: int, delay: float, rights: Sequence[float], tokens: int, repeats: int) -> str:
    """A table for processes on this machine. Draws the lots anew in each repeat; plain texts take turns with others."""
    rates: dict[float | None, list[float]] = {right: [] for right in (None, *rights, 1.0)}
    outcomes = {right: _Outcomes() for right in rates}
    with slow_network(DEMO_FOLDER, split_blocks(DEMO_BLOCKS, servers), delay) as model:
        texts = PlantedTexts(model, tokens)
        texts.write(1.0, 0, outcomes[1.0])  # warms up
        for seed in range(repeats):
            for right, found in rates.items():
                found.append(texts.write(right, seed, outcomes[right]))
    plain = rates[None]
    fastest = max(rates[1.0])
    rows = [("no draft", spread(plain), "1.00", spread([rate * (servers + 1) * delay for rate in plain]), "")]
    for right in rights:
        found, share = rates[right], outcomes[right].stood / max(1, outcomes[right].verified)
        bounds = [rate * ((1 - share) / one + share / fastest) for rate, one in zip(found, plain, strict=True)]
        times = spread([rate / one for rate, one in zip(found, plain, strict=True)])
        rows.append((f"{right:g}", spread(found), times, spread(bounds), f"{share:.2f}"))
    return table(HEADING, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds one way between any two machines")
    parser.add_argument(
        "--right", type=lambda text: [float(one) for one in text.split(",")], default="0,0.5,0.8,0.95,1"
    )
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="measure over these links alone")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_hivemind()
    rights, servers, delay = arguments.right, arguments.servers, arguments.delay
    print(", ".join(machine.describe().values()))
    for path in arguments.profile:
        for right in rights:
            print(f"\nThe demo model over the links of {path.stem}, with a draft that is right with {right:g}:\n")
            print(over_profile(path, right, arguments.tokens, arguments.repeats), flush=True)
    if arguments.profile:
        return
    print(f"\nOn a virtual clock, {servers} servers, {1000 * delay:g} ms:\n")
    print(on_virtual_clock(Chain(servers, delay), rights, 5 * arguments.tokens, 5 * arguments.repeats))
    print(f"\nThe demo model over libp2p, {servers} servers, {1000 * delay:g} ms:\n")
    print(over_libp2p(servers, delay, rights, arguments.tokens, arguments.repeats))


if __name__ == "__main__":
    main()
