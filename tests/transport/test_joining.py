"""Joining by way of initial peers that are slow, silent, or not there."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import closing

import pytest

from swarm.dht.validation import AnnouncementValidator
from swarm.errors import ClockDiffers, PeerUnreachable
from swarm.transport import joining
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def address(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}"


class Attempts:
    """Stands in for `Peer.create`: fails as told, again and again, or until there are no more errors."""

    def __init__(self, *errors: Exception, repeat: bool = False) -> None:
        self.errors = list(errors)
        self.repeat = repeat
        self.count = 0

    async def __call__(self, config: P2PConfig, validator: object) -> str:
        self.count += 1
        if self.repeat:
            raise self.errors[0]
        if self.errors:
            raise self.errors.pop(0)
        return "joined"


def join(monkeypatch, attempts: Attempts, *initial_peers: str, timeout_s: float | None = None):
    monkeypatch.setattr(Peer, "create", attempts)
    monkeypatch.setattr(joining, "RETRY_PERIOD_S", 0.01)
    return asyncio.run(join_network(P2PConfig(initial_peers=initial_peers), AnnouncementValidator(), timeout_s))


@pytest.fixture
def listening_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def unused_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    return port


def test_a_peer_that_is_alive_but_slow_is_asked_again(monkeypatch, listening_port, unused_port, caplog):
    caplog.set_level(logging.WARNING, joining.logger.name)
    attempts = Attempts(PeerUnreachable("too slow"), PeerUnreachable("still too slow"))
    assert join(monkeypatch, attempts, address(unused_port), address(listening_port)) == "joined"
    assert attempts.count == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("No initial peer has answered yet; trying again for up to 1")
    assert said[1].endswith(": still too slow")


def test_after_the_time_is_up_the_error_says_how_long_it_was_tried(monkeypatch, listening_port):
    attempts = Attempts(PeerUnreachable("too slow"), repeat=True)
    began = time.monotonic()
    with pytest.raises(PeerUnreachable, match=r"^too slow \(tried for 1 s\)$"):
        join(monkeypatch, attempts, address(listening_port), timeout_s=1.0)
    assert 1.0 <= time.monotonic() - began < 60.0
    assert attempts.count > 2


def test_a_wrong_address_fails_at_once(monkeypatch, unused_port):
    attempts = Attempts(PeerUnreachable("nobody there"), repeat=True)
    with pytest.raises(PeerUnreachable, match=r"^nobody there$"):
        join(monkeypatch, attempts, address(unused_port), f"/dns4/no.such.host.invalid/tcp/1/p2p/{STRANGER}")
    assert attempts.count == 1


def test_a_machine_whose_clock_is_wrong_hears_of_it_at_once(monkeypatch, listening_port):
    error = PeerUnreachable("check this machine's clock")
    error.__cause__ = ClockDiffers("local time must be within 3 seconds")
    attempts = Attempts(error, repeat=True)
    with pytest.raises(PeerUnreachable, match="clock"):
        join(monkeypatch, attempts, address(listening_port))
    assert attempts.count == 1
