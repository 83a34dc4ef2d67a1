"""Who waits how long where more is wanted than servers can compute, with points and without.

    python -m benchmarks.simulation.points
    python -m benchmarks.simulation.points --picture docs/pictures/points.png

Servers choose what to compute with `swarm.server.compute.scheduler`, and keep accounts with `swarm.trust.points`, as
real ones do. Each holds the whole model. A contributor runs one of them and uses the others; a free rider runs none.
All do the same: think for a while, then have a text written by a server that is drawn at random.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.data_structures import Span
from swarm.protocol.messages import MAX_SHOWN_TABS, Signed
from swarm.server.compute.scheduler import FairShares, QueuedTokens, next_batch
from swarm.trust.points import CONTRIBUTOR_WEIGHT, Ledger, Spender, Tab

BLOCKS = 32
TOKENS = 96
"""Of a text."""

ITERATION_S = 0.05
NETWORK_S = 0.05
"""From an answer until the next step has come."""

THINK_S = 15.0
SERVERS, CLIENTS_OF_OWNER = 10, 2
WARM_UP_S, SECONDS = 120.0, 480.0
TAB = Signed(b"", b"", b"")


@dataclass
class Client:
    """Somebody who writes texts; `home` is the number of its own server, None for a free rider."""

    name: str
    home: int | None
    tokens_left: int = 0
    began: float = 0.0
    weight: float = 1.0
    spender: Spender | None = None
    seconds: list[float] = field(default_factory=list)


@dataclass
class Server:
    """A server: a queue, and the accounts of its owner."""

    number: int
    ledger: Ledger
    shares: FairShares = field(default_factory=FairShares)
    waiting: dict[int, tuple[Client, float]] = field(default_factory=dict)


def owner(number: int) -> str:
    """The name of a server's owner."""
    return f"owner {number}"


class Market:
    """Servers and clients on a virtual clock."""

    def __init__(self, riders: int, with_points: bool, seed: int) -> None:
        self.chance = random.Random(seed)
        self.with_points = with_points
        self.servers = [Server(number, Ledger(owner(number))) for number in range(SERVERS)]
        self.clients = [
            Client(f"{number} of {home}", home) for home in range(SERVERS) for number in range(CLIENTS_OF_OWNER)
        ] + [Client(f"rider {number}", None) for number in range(riders)]
        self.tabs: dict[str, dict[str, int]] = {}
        """What others have had of an owner, by their signatures."""
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, Any]] = []

    def run(self) -> None:
        """Let all of it happen."""
        for client in self.clients:
            self._at(self.chance.uniform(0.0, THINK_S), lambda client=client: self._begin(client))
        for server in self.servers:
            self._at(self.chance.uniform(0.0, ITERATION_S), lambda server=server: self._iterate(server))
        self.now = 0.0
        while self.events and self.now < SECONDS:
            self.now, _, act = heapq.heappop(self.events)
            act()

    def waits(self, contributes: bool) -> list[float]:
        """Seconds that a text took, beyond the time that it takes alone."""
        alone = TOKENS * (ITERATION_S + NETWORK_S)
        return [
            seconds - alone for one in self.clients if (one.home is not None) is contributes for seconds in one.seconds
        ]

    def _at(self, when: float, act: Any) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), act))

    def _begin(self, client: Client) -> None:
        server = self.servers[self.chance.choice([one for one in range(SERVERS) if one != client.home])]
        client.tokens_left, client.began = TOKENS, self.now
        client.spender, client.weight = None, 1.0
        if self.with_points and client.home is not None:
            earned = self.tabs.get(owner(client.home), {})
            here = owner(server.number)
            shown = heapq.nlargest(MAX_SHOWN_TABS, earned, key=lambda one: (one == here, earned[one]))
            client.spender = Spender(owner(client.home), {one: earned[one] for one in shown})
            if server.ledger.credit(client.spender, self.now):
                client.weight = CONTRIBUTOR_WEIGHT
        self._enqueue(server, client)

    def _enqueue(self, server: Server, client: Client) -> None:
        server.waiting[next(self.numbers)] = client, self.now

    def _iterate(self, server: Server) -> None:
        waiting = [
            QueuedTokens(
                number,
                Span(0, BLOCKS),
                client.name,
                client.name,
                1,
                short=True,
                training=False,
                idle=self.now - since,
                waited=self.now - since,
                token_cost=float(BLOCKS),
                weight=client.weight,
            )
            for number, (client, since) in server.waiting.items()
        ]
        batch = next_batch(waiting, server.shares, 2)
        server.shares.charge_batch(waiting, batch)
        for part in batch:
            client, _ = server.waiting.pop(part.number)
            client.tokens_left -= 1
            if client.tokens_left:
                self._at(self.now + ITERATION_S + NETWORK_S, lambda client=client: self._enqueue(server, client))
            else:
                self._end(server, client)
        self._at(self.now + ITERATION_S, lambda: self._iterate(server))

    def _end(self, server: Server, client: Client) -> None:
        if client.began > WARM_UP_S:
            client.seconds.append(self.now + ITERATION_S + NETWORK_S - client.began)
        if client.spender is not None and client.home is not None:
            server.ledger.charge(client.spender, TOKENS * BLOCKS, self.now)
            tabs = self.tabs.setdefault(owner(server.number), {})
            total = tabs.get(client.spender.owner, 0) + TOKENS * BLOCKS
            server.ledger.sign(Tab(client.spender.owner, owner(server.number), total), TAB, self.now)
            tabs[client.spender.owner] = total
        self._at(self.now + self.chance.expovariate(1 / THINK_S), lambda: self._begin(client))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--riders", type=int, nargs="+", default=[0, 40, 80, 120, 160])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="file for a picture of the same figures")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    for riders in options.riders:
        for with_points in (False, True):
            market = Market(riders, with_points, options.seed)
            market.run()
            for contributes in (True, False):
                waits = market.waits(contributes)
                if not waits:
                    continue
                who = "contributors" if contributes else "free riders"
                name = f"{who}, {'with' if with_points else 'without'} points"
                figures.setdefault(name, []).append(statistics.median(waits))
                print(f"{riders} free riders: {name} wait {statistics.median(waits):.1f} s (median of {len(waits)})")
    if options.picture is not None:
        draw(options.riders, figures, options.picture)


def draw(riders: list[int], figures: dict[str, list[float]], path: Path) -> None:
    """Draw the waiting times over the number of free riders."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4), layout="constrained")
    axes = picture.add_subplot()
    for name, waits in figures.items():
        style = "--" if "without" in name else "-"
        color = "tab:blue" if "contributors" in name else "tab:orange"
        axes.plot(riders[-len(waits) :], waits, style, color=color, label=name)
    axes.set_xlabel(f"free riders, beside {SERVERS * CLIENTS_OF_OWNER} clients of {SERVERS} servers' owners")
    axes.set_ylabel(f"waiting for a text of {TOKENS} tokens, s (median)")
    axes.set_ylim(bottom=0)
    axes.legend()
    picture.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
