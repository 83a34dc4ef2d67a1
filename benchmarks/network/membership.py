"""What the lock of a private swarm costs: opening a stream, and a round trip on it, with membership and without.

    python -m benchmarks.network.membership [--streams 200] [--steps 2000] [--repeats 5] [--json FILE]

Three peers on loopback, each with its own libp2p daemon: a client, a server of an open swarm, and one of a private
swarm. Both kinds are measured in turns. A stream counts as open when the first answer on it has arrived.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.common import machine
from benchmarks.common.tables import spread
from swarm.common.version import VERSION
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost
from swarm.membership.authority import create_authority, invite_member
from swarm.membership.invite import Invite
from swarm.protocol import messages
from swarm.transport.p2p import P2PConfig, Peer, quiet_hivemind
from swarm.transport.stream import Stream

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PAYLOAD_BYTES = 8192
"""A token's hidden states of size 4096 in 16 bits."""

KINDS = ("open", "private")


async def echo(stream: Stream) -> None:
    """Answer every frame with its payload."""
    while True:
        frame = await stream.receive()
        await stream.send(messages.ProbeReply(), frame.payload)


async def exchange(stream: Stream, payload: bytes) -> None:
    """A request and its answer."""
    await stream.send(messages.ProbeRequest(len(payload)), payload)
    await stream.receive()


async def start(invite: Invite | None) -> tuple[Peer, Peer]:
    """A server that echoes, and a client of it."""
    server = await Peer.create(P2PConfig(host_maddrs=LOOPBACK, membership=invite), AnnouncementValidator())
    await server.serve(echo)
    joining = P2PConfig(await server.visible_addresses(), membership=invite)
    return server, await Peer.create(joining, AnnouncementValidator())


async def time_streams(client: Peer, target: str, count: int) -> list[float]:
    """Seconds to open a stream and get the first answer on it."""
    payload, taken = secrets.token_bytes(PAYLOAD_BYTES), []
    for _ in range(count):
        began = time.perf_counter()
        stream = await client.open_stream(target)
        await exchange(stream, payload)
        taken.append(time.perf_counter() - began)
        stream.close()
    return taken


async def time_steps(client: Peer, target: str, count: int) -> list[float]:
    """Seconds of round trips on one open stream."""
    payload, taken = secrets.token_bytes(PAYLOAD_BYTES), []
    stream = await client.open_stream(target)
    try:
        for _ in range(count):
            began = time.perf_counter()
            await exchange(stream, payload)
            taken.append(time.perf_counter() - began)
    finally:
        stream.close()
    return taken


async def measure(invite: Invite, streams: int, steps: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Medians in milliseconds of each repetition: what was measured -> kind of swarm -> values."""
    peers = {"open": await start(None), "private": await start(invite)}
    results: dict[str, dict[str, list[float]]] = {what: {kind: [] for kind in KINDS} for what in ("stream", "step")}
    try:
        for _ in range(repeats):
            for kind in KINDS:
                server, client = peers[kind]
                opened = await time_streams(client, server.peer_id, streams)
                stepped = await time_steps(client, server.peer_id, steps)
                results["stream"][kind].append(statistics.median(opened) * 1000)
                results["step"][kind].append(statistics.median(stepped) * 1000)
    finally:
        for pair in peers.values():
            for peer in reversed(pair):
                await peer.shutdown()
    return results


def new_invite() -> Invite:
    """An invite of a new authority."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "members.json"
        create_authority(path)
        return invite_member(path, "benchmark", 1, time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet_hivemind()
    try:
        results = uvloop.run(measure(new_invite(), arguments.streams, arguments.steps, arguments.repeats))
    except PeerLost as error:
        raise SystemExit(str(error)) from None
    print("ms, median                            open         private")
    for what, title in (("stream", "open a stream, with one exchange"), ("step", "one exchange on an open stream")):
        print(f"{title:<32} {spread(results[what]['open'])} {spread(results[what]['private'])}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine.describe(), "version": VERSION, "ms": results}))


if __name__ == "__main__":
    main()
