"""A swarm in which some servers lie: how many wrong tokens reach clients, and which servers they lose.

    python -m benchmarks.simulation.liars
    python -m benchmarks.simulation.liars late --seeds 0 1 2 3

Clients plan routes with the router that real clients use, draw audits and witnesses as `swarm.client.audits.auditor`
does, and judge with `swarm.trust.comparison.majority` and `swarm.routing.suspicion`. Only computing is left out: what a
server gives is right, or wrong by as much as was measured (docs/trust.md).

A tenth of the servers lies, in one of these ways:

    always      everything is wrong
    sometimes   one step of fifty is wrong
    picky       everything, but only for half of the clients
    late        everything, after half an hour of honest work
    cheap       8 bits instead of 16: a tenth of the audits does not show it
    colluding   everything, and as witnesses all liars give the same wrong results
    framing     nothing; as witnesses all liars give the same wrong results
    whitewash   everything, and a server that most clients have left comes back as another one
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace

from swarm.client.audits.auditor import MAX_WITNESSES, is_witness
from swarm.data_structures import Hop, ServerInfo, ServerState, Span
from swarm.errors import MissingBlocks
from swarm.routing.cost_model import RouteRequirements, route_seconds
from swarm.routing.router import Router
from swarm.trust.comparison import Difference, majority

KINDS = ("always", "sometimes", "picky", "late", "cheap", "colluding", "framing", "whitewash")

BLOCKS = 80
TOKENS = 64
"""Of a session; a step brings one."""

ANNOUNCED_EVERY_S = 30.0
"""How often queues change, as servers announce them."""

LATE_AFTER_S = 1800.0
FALSE_ALARMS = 1 / 10_000
"""Share of the audits that two honest servers fail: less than this was measured."""

CHEAP_FOUND = 0.9
"""Share of the audits that show 8 bits. In models of hidden size 1024 and 2048 all do, in small ones fewer."""

SAME = Difference(TOKENS, 0.3, 1.0, 3.0)
SYSTEMATIC = Difference(TOKENS, 1.6, 9.0, 8.0)
WRONG = Difference(TOKENS, 100.0, 10.0, 300.0)


@dataclass(frozen=True)
class Swarm:
    """What is simulated.

    Attributes:
        kind: how a tenth of the servers lies; one of `KINDS`.
        clients: gateways, each of which writes a text every `every` seconds.
        audit: the share of work that they audit at least.
    """

    kind: str
    servers: int = 1000
    liars: float = 0.1
    clients: int = 4
    every: float = 2.0
    audit: float = 0.01
    seconds: float = 7200.0


@dataclass
class Machine:
    """A server, under its present name."""

    number: int
    lies: bool
    info: ServerInfo
    served: int = 0
    names: int = 1


@dataclass
class Minute:
    """What happened in one minute."""

    tokens: int = 0
    wrong: int = 0
    audited: int = 0
    work: int = 0
    seconds: float = 0.0


@dataclass
class Result:
    """What came of it.

    Attributes:
        lost: share of the honest servers that a client has quarantined, at the end; mean of all clients.
        found: the same of the liars, under their present names.
        gain: what a liar has served, as a share of what an honest server has.
        names: that a liar has had, on average.
    """

    swarm: Swarm
    minutes: list[Minute]
    lost: float
    found: float
    gain: float
    names: float

    def wrong_share(self, first: int, last: int) -> float:
        """Share of wrong tokens in these minutes."""
        part = self.minutes[first:last]
        return sum(one.wrong for one in part) / max(1, sum(one.tokens for one in part))

    @property
    def token_seconds(self) -> float:
        """How long a token takes, as the router expects."""
        return sum(one.seconds for one in self.minutes) / max(1, sum(one.tokens for one in self.minutes))

    @property
    def audited(self) -> float:
        """Share of the work that was computed again, witnesses included."""
        return sum(one.audited for one in self.minutes) / max(1, sum(one.work for one in self.minutes))


class World:
    """All servers and clients, on a virtual clock."""

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.swarm = swarm
        self.chance = random.Random(seed)
        self.now = 0.0
        self.minutes = [Minute() for _ in range(int(swarm.seconds // 60) + 1)]
        liars = set(self.chance.sample(range(swarm.servers), int(swarm.servers * swarm.liars)))
        self.machines = [Machine(number, number in liars, self._info(number)) for number in range(swarm.servers)]
        self.by_name = {one.info.peer_id: one for one in self.machines}
        self.clients = [Router() for _ in range(swarm.clients)]
        self.round_trips = [
            {number: self.chance.lognormvariate(-3.2, 0.6) for number in range(swarm.servers)}
            for _ in range(swarm.clients)
        ]

    def _info(self, number: int) -> ServerInfo:
        length = self.chance.randint(4, 20)
        start = self.chance.randint(0, BLOCKS - length)
        digests = tuple(map(str, range(start, start + length)))
        return ServerInfo(
            f"{number}.1",
            Span(start, start + length),
            ServerState.ONLINE,
            throughput=100 * self.chance.lognormvariate(0.0, 0.5),
            cache_tokens_free=10**6,
            revision="main",
            digests=digests,
            compute_dtype="bfloat16",
            quantization="none",
            version="1",
        )

    def run(self) -> Result:
        """Let all of it happen."""
        swarm = self.swarm
        announced = -ANNOUNCED_EVERY_S
        turns = int(swarm.seconds / swarm.every)
        for _ in range(turns):
            if self.now - announced >= ANNOUNCED_EVERY_S:
                announced = self.now
                self._announce()
            for number in range(swarm.clients):
                self._write(number)
            self.now += swarm.every
        return self._result()

    def _announce(self) -> None:
        if self.swarm.kind == "whitewash":
            for machine in self.machines:
                if machine.lies and 2 * sum(self._is_left(machine, one) for one in self.clients) > len(self.clients):
                    machine.names += 1
                    machine.info = replace(machine.info, peer_id=f"{machine.number}.{machine.names}")
        for machine in self.machines:
            machine.info = replace(machine.info, queue_delay=self.chance.expovariate(10.0))
        self.by_name = {one.info.peer_id: one for one in self.machines}
        for number, client in enumerate(self.clients):
            client.update([one.info for one in self.machines])
            trips = {one.info.peer_id: self.round_trips[number][one.number] for one in self.machines}
            client.record_round_trips(trips, self.now)

    def _is_left(self, machine: Machine, client: Router) -> bool:
        return client.suspicions.of(machine.info.peer_id, self.now).is_quarantined

    def _write(self, client: int) -> None:
        """A client writes one text, and audits some of its servers."""
        router, minute = self.clients[client], self.minutes[int(self.now // 60)]
        try:
            route = router.route(Span(0, BLOCKS), self.now)
        except MissingBlocks:
            return
        minute.tokens += TOKENS
        minute.seconds += TOKENS * route_seconds(router.snapshot, route, RouteRequirements())
        wrong = [self._wrong_tokens(hop, client) for hop in route.hops]
        minute.wrong += min(TOKENS, sum(wrong))
        for hop, wrong_tokens in zip(route.hops, wrong, strict=True):
            minute.work += TOKENS * hop.span.length
            self.by_name[hop.server.peer_id].served += TOKENS * hop.span.length
            rate = router.suspicions.audit_rate(hop.server.peer_id, self.swarm.audit, self.now)
            if self.chance.random() < rate:
                self._audit(client, hop, wrong_tokens, minute)

    def _wrong_tokens(self, hop: Hop, client: int) -> int:
        if not self.by_name[hop.server.peer_id].lies:
            return 0
        match self.swarm.kind:
            case "sometimes":
                return sum(self.chance.random() < 0.02 for _ in range(TOKENS))
            case "picky":
                return TOKENS * (client % 2)
            case "late":
                return TOKENS * (self.now >= LATE_AFTER_S)
            case "framing":
                return 0
        return TOKENS

    def _audit(self, client: int, hop: Hop, wrong: int, minute: Minute) -> None:
        """What `Auditor.audit` does: ask others until two agree."""
        router, audited = self.clients[client], hop.server.peer_id
        able = [one.info for one in self.machines if is_witness(one.info, hop)]
        witnesses = router.suspicions.witnesses(able, self.chance, self.now)
        # Whether fewer bits show depends on the text; honest machines hardly differ, so it shows to all or to none.
        shows = self.chance.random() < CHEAP_FOUND
        results = {audited: self._answer(audited, client, wrong)}
        for witness in [one.peer_id for one in witnesses[:MAX_WITNESSES]]:
            results[witness] = self._answer(witness, client, None)
            minute.audited += TOKENS * hop.span.length
            verdict = majority(list(results), lambda one, other: self._difference(results[one], results[other], shows))
            if verdict is not None:
                for peer, (agreement, _) in verdict.items():
                    router.suspicions.record(peer, agreement, self.now)
                return

    def _answer(self, peer: str, client: int, wrong: int | None) -> str:
        """What a server gives: right, wrong in its own way, or as its accomplices do. `wrong` is None for a witness."""
        lies, kind = self.by_name[peer].lies, self.swarm.kind
        if not lies or wrong == 0:
            return "right"
        if kind == "cheap":
            return "cheap"
        if wrong is None:  # it does not know that it is one
            if kind in ("colluding", "framing"):
                return "agreed"
            if kind == "late" and self.now < LATE_AFTER_S:
                return "right"
            if kind == "sometimes" and self.chance.random() < 0.98**TOKENS:
                return "right"
            if kind == "picky" and not client % 2:
                return "right"
        return "agreed" if kind == "colluding" else f"wrong {peer}"

    def _difference(self, one: str, other: str, shows: bool) -> Difference:
        if one == other:
            return SYSTEMATIC if self.chance.random() < FALSE_ALARMS and one == "right" else SAME
        if {one, other} == {"right", "cheap"}:
            return SYSTEMATIC if shows else SAME
        return WRONG

    def _result(self) -> Result:
        def left(lies: bool) -> float:
            machines = [one for one in self.machines if one.lies is lies]
            return sum(self._is_left(one, client) for one in machines for client in self.clients) / (
                len(machines) * len(self.clients)
            )

        liars = [one for one in self.machines if one.lies]
        honest = [one for one in self.machines if not one.lies]
        gain = (sum(one.served for one in liars) / len(liars)) / (sum(one.served for one in honest) / len(honest))
        names = sum(one.names for one in liars) / len(liars)
        return Result(self.swarm, self.minutes[:-1], left(False), left(True), gain, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two texts of a client")
    parser.add_argument("--audit", type=float, default=0.01)
    parser.add_argument("--hours", type=float, default=2.0)
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"no kind {unknown[0]!r}: choose among {', '.join(KINDS)}")
    for kind in options.kinds or KINDS:
        for seed in options.seeds:
            began = time.perf_counter()
            swarm = Swarm(
                kind,
                options.servers,
                clients=options.clients,
                every=options.every,
                audit=options.audit,
                seconds=3600 * options.hours,
            )
            found = World(swarm, seed).run()
            shares = [found.wrong_share(first, first + 10) for first in range(0, len(found.minutes), 10)]
            print(
                f"{kind:<10} seed {seed}: wrong tokens per mille by 10 minutes "
                + " ".join(f"{1000 * share:.2f}" for share in shares)
                + f"; liars left {found.found:.1%}, honest left {found.lost:.2%}, audited {found.audited:.2%}, "
                f"a token takes {found.token_seconds:.2f} s, "
                f"a liar served {found.gain:.2f} of an honest one, names {found.names:.1f} "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
