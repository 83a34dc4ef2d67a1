from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hivemind.p2p import P2P
from multiaddr import Multiaddr

from swarm.errors import PeerLost, RelayRefused
from swarm.transport import daemon, daemon_streams
from swarm.transport.daemon import (
    CIRCUITS_PER_PEER,
    RELAY_BUFFER_BYTES,
    RELAY_DATA_LIMIT_BYTES,
    RELAY_TIME_LIMIT,
    RESERVATIONS_A_PEER,
    DaemonOptions,
    start_daemon,
)
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.reach.circuit import LIBP2P_LIMITS, Place, ask_for_place

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

USUAL = {
    "relayBufferSize": RELAY_BUFFER_BYTES,
    "relayTimeLimit": RELAY_TIME_LIMIT,
    "relayDataLimit": RELAY_DATA_LIMIT_BYTES,
}


def test_a_relay_has_as_many_places_as_it_was_told():
    limits = daemon._relay_limits(DaemonOptions(relayed_peers=7))
    assert limits == {
        "relayMaxReservations": 7 * RESERVATIONS_A_PEER + 1,
        "relayMaxCircuits": CIRCUITS_PER_PEER,
        **USUAL,
    }


def test_who_does_not_relay_has_no_places_and_carries_nothing():
    assert daemon._relay_limits(DaemonOptions()) == {"relayMaxReservations": 0, "relayMaxCircuits": 0, **USUAL}


def test_other_limits_take_the_place_of_the_usual_ones():
    options = DaemonOptions(relayed_peers=7, relay_limits={"relayTimeLimit": "2s", "relayMaxReservations": 1})
    assert daemon._relay_limits(options) == {
        "relayMaxReservations": 1,
        "relayMaxCircuits": CIRCUITS_PER_PEER,
        **USUAL,
        "relayTimeLimit": "2s",
    }


class Daemons(contextlib.AsyncExitStack):
    """Real daemons on loopback, all of which are ended."""

    async def start(self, **options: object) -> P2P:
        folder = ProcessFolder()
        self.callback(folder.remove)
        p2p = await start_daemon(DaemonOptions(host_maddrs=["/ip4/127.0.0.1/tcp/0"], **options), folder.path)
        self.push_async_callback(p2p.shutdown)
        return p2p

    async def ask(self, home: P2P, relay: P2P) -> Place:
        """What a relay grants a peer that connects to it."""
        _, (address, *_) = await relay._client.identify()
        await daemon_streams.connect(home, relay.peer_id, [Multiaddr(str(address))])
        return await ask_for_place(home, relay.peer_id, 10.0)


def play(scenario: Callable[[Daemons], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(120), Daemons() as real:
            await scenario(real)

    uvloop.run(whole())
    gc.collect()  # while this module's filter holds


def test_the_limits_of_a_relay_hold_whenever_it_is_started():
    """Left alone, about every second daemon relays with the limits of libp2p: 128 KiB and two minutes."""

    async def scenario(real):
        home = await real.start()
        for _ in range(4):
            place = await real.ask(home, await real.start(relayed_peers=7, is_local=False))
            assert (place.limit_s, place.limit_bytes) == (86400, RELAY_DATA_LIMIT_BYTES)

    play(scenario)


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([Place(60, *LIBP2P_LIMITS)], True),
        ([Place(60, 86400, 1 << 36)], False),
        ([PeerLost("it does not answer"), Place(60, *LIBP2P_LIMITS)], True),
        ([RelayRefused("it has no place left"), Place(60, 86400, 1 << 36)], False),
        ([PeerLost("it does not answer")] * daemon.PROBE_TRIES, False),
    ],
    ids=["too small", "right", "slow, and too small", "slow, and right", "never answers"],
)
def test_a_daemon_that_is_slow_to_answer_is_asked_for_its_limits_again(monkeypatch, answers, wrong):
    left = list(answers)

    async def ask(*_: object) -> Place:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def connect(*_: object) -> None:
        pass

    async def identify() -> tuple[None, list[Multiaddr]]:
        return None, []

    monkeypatch.setattr(daemon, "ask_for_place", ask)
    monkeypatch.setattr(daemon_streams, "connect", connect)
    asked: Any = SimpleNamespace(_client=SimpleNamespace(identify=identify), peer_id=None)
    assert asyncio.run(daemon._has_wrong_limits(asked, DaemonOptions(), asked)) is wrong
    assert left == []


def test_a_relay_for_one_peer_has_a_place_for_the_first_that_asks():
    async def scenario(real):
        place = await real.ask(await real.start(), await real.start(relayed_peers=1, is_local=False))
        assert place.seconds > 600

    play(scenario)
