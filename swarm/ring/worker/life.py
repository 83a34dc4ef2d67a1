"""A worker's side of the conversation with its starter, and what becomes of its assignment.

    idle ──Assign──► receiving ──► starting ──► online ──Release, or the starter gone for `GRACE_S`──► idle
                         └────────────┴────────────┴──── failed (the starter decides what next)

A starter that comes back within the grace time finds everything as it was: an assignment that it repeats is not begun
anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import PairingRefused, PeerTimeout, ProtocolViolation, RemoteError, SwarmError, WrongSecret
from swarm.protocol import messages
from swarm.protocol.messages import MAX_REFUSAL_CHARACTERS, Assign, Holding, WorkerEvent
from swarm.ring.heartbeat import HEARTBEAT_S, PAIRING_TIMEOUT_S, receive
from swarm.ring.pairing import new_nonce, require_proof, require_starter
from swarm.ring.worker.duty import WorkerDuty
from swarm.ring.worker.memory import WorkerMemory
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)

GRACE_S = 120.0
"""How long an assignment outlives the connection to its starter, which may be starting again."""

WRONG_SECRETS, REFILL_PER_S = 5.0, 1 / 30
"""Wrong secrets that one peer may try at once, and then every second."""

MAX_PEERS = 4096
MAX_PAIRING = 16
"""Streams that may be pairing at the same time."""

EVENT_PERIOD_S = 0.2
"""Least time between two events, so that progress does not fill the stream."""

REFUSAL_TIMEOUT_S = 2.0
"""How long a refused stream stays open, so that the refusal can be read."""


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is doing, for people.

    Attributes:
        is_connected: whether its starter talks to it now.
        event: what it does.
        assignment: what it was given.
    """

    is_connected: bool
    event: WorkerEvent
    assignment: Assign | None


IDLE = WorkerEvent("idle", 0)


class WorkerLife:
    """One worker. It serves streams of starters until `close`.

    Args:
        own_id: this peer's id.
        memory: what it remembers; written at each change.
        is_member: whether a gate lets only members of a private swarm in, so that no secret is needed.
        duty: carries out assignments.
        on_change: called with each change of status.
    """

    def __init__(
        self,
        own_id: str,
        memory: WorkerMemory,
        is_member: bool,
        duty: WorkerDuty,
        on_change: Callable[[WorkerStatus], None] = lambda status: None,
    ) -> None:
        self.memory = memory
        self._own_id = own_id
        self._secret = None if is_member else memory.secret
        self._duty = duty
        self._on_change = on_change
        self._attempts = TokenBuckets[str](WRONG_SECRETS, REFILL_PER_S, MAX_PEERS)
        self._pairing = 0
        self._session: Stream | None = None
        self._assignment: Assign | None = None
        self._event = IDLE
        self._changed = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._grace: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(self._session is not None, self._event, self._assignment)

    async def serve(self, stream: Stream) -> None:
        """Talk to a peer that wants to be the starter. Raises `RemoteError` when the conversation ends."""
        if self._pairing >= MAX_PAIRING:
            stream.abort()
            return
        self._pairing += 1
        try:
            async with asyncio.timeout(PAIRING_TIMEOUT_S):
                await self._pair(stream)
        except TimeoutError:
            raise PeerTimeout(f"…{stream.peer_id[-6:]} did not pair within {PAIRING_TIMEOUT_S:g} s") from None
        except PairingRefused as refused:
            logger.warning("A starter (…%s) was refused: %s", stream.peer_id[-6:], refused)
            await stream.send(messages.refusal(refused))
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                    await stream.discard_incoming()
            return
        finally:
            self._pairing -= 1
        await self._talk(stream)

    async def close(self) -> None:
        """End the assignment, and whatever runs for it."""
        await self._release()
        if self._session is not None:
            self._session.close()
        self._end_grace()

    async def _pair(self, stream: Stream) -> None:
        challenge = messages.WorkerChallenge(new_nonce())
        await stream.send(challenge)
        request, _ = await receive(stream, PAIRING_TIMEOUT_S, max_payload=0)
        if not isinstance(request, messages.PairRequest):
            raise ProtocolViolation("a request to pair was due")
        starter, now = stream.peer_id, time.monotonic()
        if self._attempts.left(starter, now) < 1:
            raise PairingRefused("too many wrong secrets; copy the worker's line again, and wait a minute")
        try:
            require_proof(request, challenge, self._secret, self._own_id, starter)
        except WrongSecret:
            self._attempts.take(starter, 1, now)
            raise
        require_starter(self.memory.starter, starter)
        if self.memory.starter is None:
            self._remember(starter)
            logger.info("Paired with the starter %s (…%s)", request.name or "without a name", starter[-6:])
        await stream.send(messages.Paired())

    def _remember(self, starter: str | None) -> None:
        self.memory = self.memory.paired_with(starter)
        self.memory.write()

    async def _talk(self, stream: Stream) -> None:
        """Do what the starter says, until it or its connection ends. A newer stream of it takes the place of this."""
        if self._session is not None:
            self._session.abort()
        self._session = stream
        self._end_grace()
        self._tell(self._event)
        telling = asyncio.create_task(self._report_events(stream))
        try:
            while True:
                message, frame = await receive(stream)
                await self._answer(stream, message, len(frame.payload))
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            if self._session is stream:
                self._session = None
                if self._assignment is not None:
                    logger.info("The starter is gone; the assignment is kept for %.0f s", GRACE_S)
                    self._grace = asyncio.create_task(self._release_after_grace())
                self._on_change(self.status)

    async def _answer(self, stream: Stream, message: messages.WorkerMessage, payload_bytes: int) -> None:
        match message:
            case messages.StillHere():
                pass
            case messages.DescribeDevice():
                await stream.send(self._duty.report(_holding(self._assignment)))
            case messages.ProbeRequest(reply_bytes=reply_bytes):
                await stream.send(messages.ProbeReply(), bytes(reply_bytes))
            case messages.Assign():
                await self._assign(message)
            case messages.Release(unpair=unpair):
                await self._release()
                if unpair:
                    self._remember(None)
                    logger.info("The pairing has ended; another starter may come")
                await stream.send(messages.Released())
            case _:
                raise ProtocolViolation(f"a starter does not send a {type(message).__name__}")

    async def _report_events(self, stream: Stream) -> None:
        """Send the newest event at each change, and a sign of life if nothing changes."""
        with suppress(RemoteError):  # the one who listens sees it, too
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._changed.wait()
                except TimeoutError:
                    await stream.send(messages.StillHere())
                    continue
                self._changed.clear()
                await stream.send(self._event)
                await asyncio.sleep(EVENT_PERIOD_S)

    def _tell(self, event: WorkerEvent) -> None:
        number = self._assignment.number if self._assignment is not None else 0
        self._event = msgspec.structs.replace(event, number=number, message=event.message[:MAX_REFUSAL_CHARACTERS])
        self._changed.set()
        self._on_change(self.status)

    async def _assign(self, assignment: Assign) -> None:
        async with self._lock:
            if self._assignment is not None and self._is_working and is_same_work(self._assignment, assignment):
                self._assignment = assignment
                self._duty.know(assignment)
                self._tell(self._event)
                return
            await self._interrupt()
            self._assignment = assignment
            self._tell(WorkerEvent("receiving", assignment.number, server_id=self._event.server_id))
            self._working = asyncio.create_task(self._work(assignment))

    @property
    def _is_working(self) -> bool:
        return self._working is not None and not self._working.done()

    async def _work(self, assignment: Assign) -> None:
        try:
            await self._duty.carry_out(assignment, self._tell)
        except SwarmError as error:
            self._tell(WorkerEvent("failed", assignment.number, str(error)))
        except Exception as error:  # whatever runs here must not leave the starter waiting
            logger.exception("the assignment failed")
            self._tell(WorkerEvent("failed", assignment.number, f"it broke down: {error!r}"))

    async def _interrupt(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            self._working = None

    async def _release(self) -> None:
        async with self._lock:
            await self._interrupt()
            await self._duty.stop()
            self._assignment = None
            self._tell(IDLE)

    async def _release_after_grace(self) -> None:
        await asyncio.sleep(GRACE_S)
        logger.info("The starter did not come back; the assignment has ended")
        self._grace = None
        await self._release()

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None


def is_same_work(old: Assign, new: Assign) -> bool:
    """Whether an assignment asks for what is done already; other holders of weights make no difference. Pure."""
    old, new = (msgspec.structs.replace(one, number=0, holders=()) for one in (old, new))
    return old == new


def _holding(assignment: Assign | None) -> Holding | None:
    return Holding(assignment.model, assignment.revision, assignment.start, assignment.end) if assignment else None
