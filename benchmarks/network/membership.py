"""What the lock of a private swarm costs: opening a stream, and a round trip on it, with membership and without.

    python -m benchmarks.network.membership [--streams 200] [--steps 2000]

Three peers on loopback, each with its own libp2p daemon: a client, a server of an open swarm, and one of a private
swarm. Both kinds are measured in turns. A stream counts as open when the first answer on it has arrived.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.common.report import Report, report_parser
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


async def measure(report: Report, invite: Invite, streams: int, steps: int) -> None:
    """Measure both kinds of swarm alternately."""
    peers = {"open": await start(None), "private": await start(invite)}
    try:
        for _ in report.rounds():
            for what, time_it, count in (
                ("open a stream, with one exchange", time_streams, streams),
                ("one exchange on an open stream", time_steps, steps),
            ):
                taken = {
                    kind: 1e3 * statistics.median(await time_it(client, server.peer_id, count))
                    for kind, (server, client) in peers.items()
                }
                report.add("open, ms", taken["open"], where=what)
                report.add("private, ms", taken["private"], "less", where=what)
                report.add("times open", taken["private"] / taken["open"], "less", decides=True, where=what)
    finally:
        for pair in peers.values():
            for peer in reversed(pair):
                await peer.shutdown()


def new_invite() -> Invite:
    """An invite of a new authority."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "members.json"
        create_authority(path)
        return invite_member(path, "benchmark", 1, time.time())


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    quiet_hivemind()
    with Report(arguments) as report:
        try:
            uvloop.run(measure(report, new_invite(), arguments.streams, arguments.steps))
        except PeerLost as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
