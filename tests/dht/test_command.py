"""`python -m swarm.dht`: a bootstrap peer that others join by, and that carries traffic for those behind firewalls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hivemind.p2p import P2PDaemonError, PeerID

from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.p2p import P2PConfig, Peer

RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"


@pytest.fixture
def start() -> Iterator[object]:
    started: list[PeerProcess] = []

    def run(*arguments: str) -> PeerProcess:
        started.append(PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK, *arguments)))
        return started[-1]

    yield run
    for process in started:
        assert process.stop() == 0


async def relays(address: str) -> bool:
    """Whether the peer at the address offers to carry traffic for others."""
    peer = await Peer.create(P2PConfig(initial_peers=(address,)), AnnouncementValidator())
    try:
        target = PeerID.from_base58(address.rpartition("/")[2])
        _, _, writer = await peer._p2p.call_binary_stream_handler(target, RELAY_PROTOCOL)
        writer.close()
        return True
    except P2PDaemonError:
        return False
    finally:
        await peer.shutdown()


@pytest.mark.slow
def test_it_keeps_its_address_and_relays(start, tmp_path) -> None:
    identity = str(tmp_path / "peer.key")
    first = start("--identity-path", identity)
    address = first.address()
    first.wait_for(f"^Set SWARM_INITIAL_PEERS={address} ")
    assert asyncio.run(relays(address))
    first.stop()
    second = start("--identity-path", identity)
    assert second.address().rpartition("/")[2] == address.rpartition("/")[2]
