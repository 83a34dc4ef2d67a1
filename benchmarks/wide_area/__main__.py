"""Texts over servers that are far apart: what speculative decoding gains, and how near that is to what is possible.

    python -m benchmarks.wide_area [--servers 4] [--delay 0.05] [--right 0,0.5,0.8,0.95,1] [--tokens 200]
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

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.wide_area.planted_texts import DEMO_BLOCKS, PlantedTexts, over_profile
from benchmarks.wide_area.virtual import Chain, generate, planted
from swarm.client.routes.events import GuessVerified
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind


def on_virtual_clock(report: Report, chain: Chain, rights: Sequence[float], tokens: int, repeats: int) -> None:
    """Measure servers on a virtual clock."""
    where = f"virtual clock, {chain.servers} servers, {1000 * chain.delay_s:g} ms"
    plain = generate(chain, tokens, lambda swarm: []).rate
    report.add("tokens/s", plain, "more", where=f"{where}, no draft")
    report.add("of the bound", plain * chain.round_s, "more", where=f"{where}, no draft")
    for right in rights:
        for seed in range(repeats):
            found = planted(chain, right, tokens, seed)
            bound = chain.bound(found.stood)
            _add_guessed(report, f"{where}, right with {right:g}", found.rate, plain, bound, found.stood)


def _add_guessed(report: Report, where: str, rate: float, plain: float, bound: float, stood: float) -> None:
    report.add("tokens/s", rate, "more", where=where)
    report.add("times plain", rate / plain, "more", where=where)
    report.add("of the bound", rate / bound, "more", where=where)
    report.add("guesses that stood", stood, where=where)


class _Outcomes:
    """Counts the guesses of a session."""

    def __init__(self) -> None:
        self.stood = self.verified = 0

    def __call__(self, event: Any) -> None:
        if isinstance(event, GuessVerified):
            self.verified += 1
            self.stood += event.stands


def over_libp2p(report: Report, servers: int, delay: float, rights: Sequence[float], tokens: int) -> None:
    """Measure processes on this machine. Draws the lots anew in each round; plain texts take turns with others."""
    where = f"libp2p, {servers} servers, {1000 * delay:g} ms"
    with slow_network(DEMO_FOLDER, split_blocks(DEMO_BLOCKS, servers), delay) as model:
        texts = PlantedTexts(model, tokens)
        texts.write(1.0, 0, _Outcomes())  # warms up
        for seed in report.rounds(where):
            plain, fastest = (texts.write(right, seed, _Outcomes()) for right in (None, 1.0))
            report.add("tokens/s", plain, "more", decides=True, where=f"{where}, no draft")
            report.add("of the bound", plain * (servers + 1) * delay, "more", where=f"{where}, no draft")
            for right in rights:
                outcomes = _Outcomes()
                rate = texts.write(right, seed, outcomes) if right < 1 else fastest
                share = outcomes.stood / max(1, outcomes.verified) if right < 1 else 1.0
                bound = 1 / ((1 - share) / plain + share / fastest)
                _add_guessed(report, f"{where}, right with {right:g}", rate, plain, bound, share)


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds one way between any two machines")
    parser.add_argument(
        "--right", type=lambda text: [float(one) for one in text.split(",")], default="0,0.5,0.8,0.95,1"
    )
    parser.add_argument("--profile", type=Path, nargs="+", default=[], help="measure over these links alone")
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_hivemind()
    rights, servers, delay = arguments.right, arguments.servers, arguments.delay
    with Report(arguments) as report:
        for path in arguments.profile:
            for right in rights:
                over_profile(report, path, right, arguments.tokens)
        if not arguments.profile:
            on_virtual_clock(report, Chain(servers, delay), rights, 5 * arguments.tokens, 5 * arguments.repeats)
            over_libp2p(report, servers, delay, rights, arguments.tokens)


if __name__ == "__main__":
    main()
