"""Time of route planning in a large swarm, and how close its routes are to the optimum.

    python -m benchmarks.network.routing

The servers lie in a square whose side is a round trip of 200 ms, hold 2 to 16 blocks, and announce round trips to some
of the servers that hold the block after their span. The exact optimum is the same search with a beam as wide as the
swarm, which tries all pairs at every boundary. With a few hundred servers it is the reference `shortest_path` instead.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable

from benchmarks.common.machine import describe
from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import RouteRequirements, route_seconds
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.routing.exact_reference import shortest_path

SIDE = 0.2
SESSION = RouteRequirements(cache_tokens=4096)


def random_swarm(
    rng: random.Random, servers: int, blocks: int, announced: int, pinged: int, speed: float = 400
) -> SwarmSnapshot:
    """Make a random swarm as a client sees it, with at least one server for each block.

    Args:
        announced: number of round trips that each server announces.
        pinged: number of servers that the client has measured.
        speed: median blocks per second.
    """
    places = [(rng.random(), rng.random()) for _ in range(servers)]
    access = [rng.lognormvariate(math.log(0.008), 0.8) for _ in range(servers)]
    spans = [_random_span(rng, blocks, number) for number in range(servers)]
    # As when read from the network, each occurrence of a peer id is a separate string.
    peer_ids = [b"Qm%044d" % number for number in range(servers)]
    holders = [[number for number in range(servers) if block in spans[number]] for block in range(blocks)]

    def announcement(number: int) -> ServerInfo:
        end = spans[number].end
        others = rng.sample(holders[end], min(announced, len(holders[end]))) if end < blocks else []
        round_trips = (
            (peer_ids[o].decode(), SIDE * math.dist(places[number], places[o]) + access[number] + access[o])
            for o in others
        )
        throughput = rng.lognormvariate(math.log(speed), 0.7)
        return ServerInfo(
            peer_id=peer_ids[number].decode(),
            span=spans[number],
            state=ServerState.ONLINE,
            throughput=throughput,
            cache_tokens_free=rng.choice([0, 8192, 65536]),
            revision="main",
            digests=(),
            compute_dtype="bfloat16",
            quantization="none",
            version="1",
            forward_throughput=throughput * rng.uniform(5, 50),
            network_throughput=rng.choice([0, 200, 1000, 5000]),
            queue_delay=rng.expovariate(1 / 0.01),
            round_trips=tuple(round_trips),
        )

    infos = tuple(announcement(number) for number in range(servers))
    client = (rng.random(), rng.random())
    measured = {
        peer_ids[number].decode(): SIDE * math.dist(client, places[number]) + access[number] + 0.005
        for number in rng.sample(range(servers), min(pinged, servers))
    }
    return SwarmSnapshot(infos, measured)


def _random_span(rng: random.Random, blocks: int, number: int) -> Span:
    length = min(blocks, rng.choice((2, 4, 4, 8, 8, 12, 16)))
    # The first servers follow one another, so that there is a route even in a small swarm.
    start = number * 2 if number * 2 < blocks else rng.randrange(1 - length, blocks)
    start = max(0, min(start, blocks - length))
    return Span(start, start + length)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _summary(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def measure(swarms: list[SwarmSnapshot], wanted: Span, reference: bool) -> list[str]:
    """The cells of one row of the table: medians and ranges over the swarms."""
    index, route, ratios = [], [], []
    first_block = Span(wanted.start, wanted.start + 1)
    for snapshot in swarms:
        known = SwarmSnapshot(snapshot.servers, snapshot.round_trips)
        index.append(_timed(lambda known=known: (known.links, find_route(known, first_block, SESSION))))
        route.append(_timed(lambda known=known: find_route(known, wanted, SESSION)))
        if reference:
            best = shortest_path(known, wanted, SESSION)
        else:
            best = find_route(known, wanted, SESSION, beam_width=len(known))
        found = route_seconds(known, find_route(known, wanted, SESSION), SESSION)
        ratios.append(found / route_seconds(known, best, SESSION))
    both = [one + other for one, other in zip(index, route, strict=True)]
    return [_summary(index, ".0f"), _summary(route, ".0f"), _summary(both, ".0f"), _summary(ratios, ".4f")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--swarms", type=int, default=7, help="random swarms for each row")
    options = parser.parse_args()
    few, many = min(300, options.servers), options.servers
    print(", ".join(f"{key} {value}" for key, value in describe().items()))
    print("| servers | announced | pinged | blocks/s | ms index | ms route | ms both | cost / exact cost | exact by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = [(few, 16, 32, 400), *itertools.product([many], [16, 64], [32, many], [400, 8000])]
    for servers, announced, pinged, speed in rows:
        swarms = [
            random_swarm(random.Random(seed), servers, options.blocks, announced, pinged, speed)
            for seed in range(options.swarms)
        ]
        reference = servers <= 300
        cells = measure(swarms, Span(0, options.blocks), reference)
        cells += ["reference" if reference else "full beam"]
        print(f"| {servers} | {announced} | {pinged} | {speed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
