from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
import uvloop
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr

from swarm.errors import PeerLost
from swarm.transport import daemon, daemon_streams
from swarm.transport.daemon import (
    CIRCUITS_PER_PEER,
    RELAY_BUFFER_BYTES,
    RELAY_DATA_LIMIT_BYTES,
    RELAY_TIME_LIMIT,
    RESERVATIONS_A_PEER,
    DaemonOptions,
    mend_calls,
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
    assert daemon._relay_limits(DaemonOptions()) == {"relayMaxReservations": 0, "relayMaxCircuits": 0, **USUAL}
    other = {"relayTimeLimit": "2s", "relayMaxReservations": 1}
    assert daemon._relay_limits(DaemonOptions(relayed_peers=7, relay_limits=other)) == limits | other


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


def test_a_relay_has_a_place_for_the_first_that_asks_and_its_limits_hold():
    """Left alone, about every second daemon relays with the limits of libp2p: 128 KiB and two minutes."""

    async def scenario(real):
        home = await real.start()
        for _ in range(2):
            place = await real.ask(home, await real.start(relayed_peers=1, is_local=False))
            assert place.seconds > 600
            assert (place.limit_s, place.limit_bytes) == (86400, RELAY_DATA_LIMIT_BYTES)

    play(scenario)


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([Place(60, *LIBP2P_LIMITS)], True),
        ([Place(60, 86400, 1 << 36)], False),
        ([PeerLost("it does not answer"), Place(60, *LIBP2P_LIMITS)], True),
        ([PeerLost("it does not answer")] * daemon.PROBE_TRIES, False),
    ],
    ids=["too small", "right", "slow, and too small", "never answers"],
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


PEER = bytes.fromhex("1220") + bytes(32)


class PlayedDaemon:
    """The daemon's end of the connection; what it writes is read by hivemind's own task."""

    def __init__(self, mended: bool = True) -> None:
        self.control = ControlClient(None, _initialized_with_create=True)
        if mended:
            mend_calls(self.control)
        self._reader = asyncio.StreamReader()
        self.reading = asyncio.ensure_future(self.control._read_from_persistent_conn(self._reader))

    def write(self, call_id: UUID, **fields: object) -> None:
        data = p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, **fields).SerializeToString()
        length, prefix = len(data), bytearray()
        while length >= 0x80:
            prefix.append(length & 0x7F | 0x80)
            length >>= 7
        self._reader.feed_data(bytes([*prefix, length]) + data)

    def answer(self, call_id: UUID, text: bytes) -> None:
        self.write(call_id, callUnaryResponse=p2pd_pb2.CallUnaryResponse(response=text))

    async def call(self) -> tuple[UUID, asyncio.Task[bytes]]:
        """A call that waits for its answer."""
        task = asyncio.ensure_future(self.control.call_unary_handler(_Id(), "name", b""))
        request = await self.control._pending_messages.get()
        return UUID(bytes=request.callId), task

    async def close(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)


class _Id:
    def to_bytes(self) -> bytes:
        return PEER


async def given_up_while_answered(daemon: PlayedDaemon, patience_s: float = 5.0) -> None:
    """An answer, or an error, that is there when its caller gives up, and a call after it."""
    for fields in (
        {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(response=b"late")},
        {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(error=b"late")},
        {"daemonError": p2pd_pb2.DaemonError(message="late")},
        {},
    ):
        call_id, task = await daemon.call()
        daemon.write(call_id, **fields)  # the task that reads runs next, before the caller
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await daemon.control._pending_messages.get()  # which tells the daemon that the call was given up
        daemon.write(call_id, **fields)  # and once more, when nobody knows the call
        await asyncio.sleep(0)
    call_id, task = await daemon.call()
    daemon.answer(call_id, b"on time")
    async with asyncio.timeout(patience_s):
        assert await task == b"on time"
    assert not daemon.reading.done()


def test_an_answer_in_the_moment_in_which_its_caller_gives_up():
    async def scenario() -> None:
        daemon = PlayedDaemon()
        await given_up_while_answered(daemon)
        await daemon.close()

    asyncio.run(scenario())


def test_hivemind_still_breaks_down_of_it():
    """If this fails, hivemind was mended, and `mend_calls` may go."""

    async def scenario() -> None:
        daemon = PlayedDaemon(mended=False)
        with pytest.raises(TimeoutError):
            await given_up_while_answered(daemon, 0.5)
        assert isinstance(daemon.reading.exception(), asyncio.InvalidStateError)

    asyncio.run(scenario())


class Held:
    """What a request holds while it is answered."""


def test_requests_whose_sender_has_gone_are_forgotten():
    async def scenario() -> None:
        daemon, held = PlayedDaemon(), weakref.WeakSet[Held]()

        async def handle(data: bytes, sender: object) -> bytes:
            holding = Held()
            held.add(holding)
            if data == b"wait":
                await asyncio.Event().wait()
            assert holding
            return b""

        daemon.control.unary_handlers["name"] = handle
        for data in (b"wait", b"", b"wait", b"unknown"):
            call_id = uuid4()
            proto = "name" if data != b"unknown" else "other"
            daemon.write(call_id, requestHandling=p2pd_pb2.CallUnaryRequest(peer=PEER, proto=proto, data=data))
            await asyncio.sleep(0.01)
            daemon.write(call_id, cancel=p2pd_pb2.Cancel())
        at_once = uuid4()  # both are there before the request's task runs
        daemon.write(at_once, requestHandling=p2pd_pb2.CallUnaryRequest(peer=PEER, proto="name", data=b"wait"))
        daemon.write(at_once, cancel=p2pd_pb2.Cancel())
        async with asyncio.timeout(5):
            while daemon.control._handler_tasks:
                await asyncio.sleep(0.01)
        gc.collect()
        assert len(held) == 0
        assert not daemon.reading.done()
        await daemon.close()

    asyncio.run(scenario())
