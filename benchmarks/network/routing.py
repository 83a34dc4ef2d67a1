"""Time of route planning in a large swarm, and how close its routes are to the optimum.

    python -m benchmarks.network.routing

The servers lie in a square whose side is a round trip of 200 ms, hold 2 to 16 blocks, and announce round trips to some
of the servers that hold the block after their span. The exact optimum is the same search with a beam as wide as the
swarm, which tries all pairs at every boundary. With a few hundred servers it is the reference `shortest_path` instead.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

from benchmarks.common.report import Report, report_parser
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


def measure(report: Report, known: SwarmSnapshot, wanted: Span, reference: bool) -> None:
    """Plan a route in one swarm, and compare it with the best."""
    first_block = Span(wanted.start, wanted.start + 1)
    index = _timed(lambda: (known.links, find_route(known, first_block, SESSION)))
    route = _timed(lambda: find_route(known, wanted, SESSION))
    if reference:
        best = shortest_path(known, wanted, SESSION)
    else:
        best = find_route(known, wanted, SESSION, beam_width=len(known))
    found = route_seconds(known, find_route(known, wanted, SESSION), SESSION)
    report.add("ms index", index, "less")
    report.add("ms route", route, "less")
    report.add("ms both", index + route, "less")
    report.add("% above the exact cost", 100 * (found / route_seconds(known, best, SESSION) - 1), "less")


def main() -> None:
    parser = report_parser(__doc__, repeats=7)
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=80)
    arguments = parser.parse_args()
    few, many = min(300, arguments.servers), arguments.servers
    rows = [(few, 16, 32, 400), *itertools.product([many], [16, 64], [32, many], [400, 8000])]
    with Report(arguments) as report:
        for servers, announced, pinged, speed in rows:
            reference = servers <= 300
            by = "the reference" if reference else "a full beam"
            where = f"{servers} servers, {announced} announced, {pinged} pinged, {speed} blocks/s; exact by {by}"
            for seed in report.rounds(where):
                known = random_swarm(random.Random(seed), servers, arguments.blocks, announced, pinged, speed)
                measure(report, known, Span(0, arguments.blocks), reference)


if __name__ == "__main__":
    main()
