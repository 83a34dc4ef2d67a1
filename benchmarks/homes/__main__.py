"""Servers at home behind routers, in a laboratory of network namespaces. Needs root and nftables.

    python -m benchmarks.homes [--starts 10] [--homes 30] [--tokens 200]

Prints three tables: the time from the start of a home server to the first token of a client elsewhere; milliseconds a
token between homes, by hole punching and over relays, beside the same chain of servers that are dialed directly; and
how homes spread over five relays.
The model is the demo model, in fp32, greedy. Every text is compared with that of the local model.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter

import click
import psutil

from benchmarks.common import machine
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, Nat
from tests.homes.processes import HomesSwarm, run_homes

PROMPT = demo_prompt()
RELAYS = 5
SETTLE_S = 120.0
"""For homes that did not get a place at once."""

RELAYS_SAID = re.compile(r"reached through relays \(([^)]*)\)")
_CHAINS = {
    "both dialed directly": None,
    "two homes, connected directly": Nat.USUAL,
    "two homes with random ports": Nat.SYMMETRIC,
}
"""What the routers of the servers' homes do, if they have any."""

LOADED_SAID = re.compile(r"Loaded: .* in ([0-9.]+) s")


@click.command()
@click.option("--starts", default=10, show_default=True, help="Starts of a home server.")
@click.option("--homes", default=30, show_default=True, help=f"Homes on {RELAYS} relays; 0 for none.")
@click.option("--tokens", default=200, show_default=True, help="Tokens of a text.")
def main(starts: int, homes: int, tokens: int) -> None:
    """Print the tables."""
    print("; ".join(f"{name}: {value}" for name, value in machine.describe().items()), flush=True)
    if starts:
        print(_starts(starts), flush=True)
    print(_chains(tokens), flush=True)
    if homes:
        print(_spread(homes), flush=True)


def _starts(count: int) -> str:
    """A server at home starts, and a client waits for it."""
    expected, seconds = demo_text(PROMPT, 1), []
    for number in range(count):
        with run_homes(DEMO_FOLDER) as homes:
            homes.bootstrap(homes.lab.host("boot", 2))
            client, log = homes.client(homes.lab.host("away", 3), wait_for_blocks=120.0), homes.log("server")
            began = time.monotonic()
            server = homes.server(homes.lab.home("a", 10).machine, "0:12", log)
            client.begin(PROMPT[0].tolist(), 1)
            server.wait_ready()
            written = client.finish()
            assert written.tokens == expected, "another text"
            assert not written.avoided, "the client was sent to a server in vain"
            loaded = LOADED_SAID.search(log.read_text())
            assert loaded is not None, "it has not said how long it took to load"
            seconds.append(written.times[0] - began - float(loaded[1]))
        print(f"start {number + 1} of {count}: {seconds[-1]:.1f} s", flush=True)
    middle = statistics.median(seconds)
    return (
        "\n| from the start of a home server to a client's first token, without loading | seconds |\n| --- | --- |\n"
        f"| median of {count} (range) | {middle:.1f} ({min(seconds):.1f} to {max(seconds):.1f}) |"
    )


def _chains(tokens: int) -> str:
    """Two servers hold a half each: both on the Internet, or both at home; and clients in several places.

    Where the servers' routers choose random ports, relays carry what comes from another home.
    """
    rows = []
    for where, nat in _CHAINS.items():
        with run_homes(DEMO_FOLDER) as homes:
            homes.bootstrap(homes.lab.host("boot", 2))
            away, third = homes.lab.host("away", 3), homes.lab.home("c", 12).machine
            places = [_place(homes, name, number, nat) for name, number in (("a", 10), ("b", 11))]
            for server in [homes.server(places[0], "0:6"), homes.server(places[1], "6:12")]:
                server.wait_ready()
            clients = {"on the Internet": away, "in a third home": third}
            if nat is not None:
                clients["in the first server's home"] = places[0]
            for name, host in clients.items():
                written = homes.client(host).write(PROMPT[0].tolist(), tokens)
                assert written.tokens == demo_text(PROMPT, tokens), "another text"
                rows.append(f"| {where} | {name} | {written.seconds_a_token * 1000:.1f} |")
    return "\n| servers | client | ms a token (median) |\n| --- | --- | --- |\n" + "\n".join(rows)


def _place(homes: HomesSwarm, name: str, number: int, nat: Nat | None) -> Host:
    return homes.lab.home(name, number, nat=nat).machine if nat is not None else homes.lab.host(name, number)


def _spread(count: int) -> str:
    """Many homes hold places at few relays."""
    with run_homes(DEMO_FOLDER) as homes:
        homes.bootstrap(homes.lab.host("boot", 2), relay=False)
        relays = [homes.server(homes.lab.host(f"relay{number}", 3 + number), "0:12") for number in range(RELAYS)]
        for relay in relays:
            relay.wait_ready()
        before = [sum(one.memory_info().rss for one in _processes(relay.pid)) for relay in relays]
        logs = []
        for number in range(count):
            logs.append(homes.log(f"home{number}"))
            homes.server(homes.lab.home(f"h{number}", 20 + number).machine, "0:1", logs[-1])
        for number, server in enumerate(homes.swarm.servers[RELAYS:]):
            server.wait_ready()
            print(f"home {number + 1} of {count} serves", flush=True)
        deadline = time.monotonic() + SETTLE_S  # on a busy machine some try their relays a second time
        while not all(RELAYS_SAID.search(log.read_text()) for log in logs) and time.monotonic() < deadline:
            time.sleep(1.0)
        said = [RELAYS_SAID.findall(log.read_text()) for log in logs]
        held = [found[-1].split(", ") if found else [] for found in said]
        load = Counter(relay for relays_of_home in held for relay in relays_of_home)
        share = sum(load.values()) / RELAYS
        most = max(load.values(), default=0)
        after = [sum(one.memory_info().rss for one in _processes(relay.pid)) for relay in relays]
        grown = [now - then for now, then in zip(after, before, strict=True)]
        files = [max(one.num_fds() for one in _processes(relay.pid)) for relay in relays]
        return (
            f"\n| {count} homes on {RELAYS} relays | |\n| --- | --- |\n"
            f"| homes with at least two places | {sum(len(relays_of_home) >= 2 for relays_of_home in held)} |\n"
            f"| homes without any | {sum(not relays_of_home for relays_of_home in held)} |\n"
            f"| the relay with most places | {most}, {most / share if share else 0:.2f} of its share |\n"
            f"| a relay and its daemon have grown by at most | {max(grown) / 1e6:.0f} MB |\n"
            f"| open files of one of the two at most | {max(files)} |"
        )


def _processes(pid: int) -> list[psutil.Process]:
    """A peer's process, and its libp2p daemon."""
    peer = psutil.Process(pid)
    return [peer, max(peer.children(recursive=True), key=lambda child: child.memory_info().rss)]


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.homes")
