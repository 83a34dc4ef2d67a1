from __future__ import annotations

import asyncio
import gc
import weakref
from uuid import UUID, uuid4

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2

from swarm.transport.daemon import mend_calls
from swarm.transport.reach.circuit import encode

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

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
        self._reader.feed_data(encode(p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, **fields)))

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
