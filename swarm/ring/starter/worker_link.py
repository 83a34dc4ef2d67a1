"""The starter's side of the conversation with one worker: connects, pairs, and connects again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import PairingRefused, PeerLost, ProtocolViolation, RemoteError, remote_error
from swarm.protocol import messages
from swarm.protocol.messages import Assign, DeviceReport, WorkerEvent
from swarm.ring.heartbeat import PAIRING_TIMEOUT_S, receive, show_life
from swarm.ring.pairing import WorkerLine, answer_challenge
from swarm.ring.worker.life import IDLE
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=messages.Message)

RETRY_S = 1.0
"""Time between attempts to reach a worker that is lost."""

RETRY_REFUSED_S = 15.0
"""Time between attempts at a worker that refuses to pair: its owner may have it forget its other starter."""

ANSWER_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 30.0
"""How long a worker may take to answer, and to end what it runs."""

PINGS = 4
PROBE_SIZES_BYTES = (1 << 16, messages.MAX_PROBE_BYTES, messages.MAX_PROBE_BYTES)
MIN_PROBE_S = 0.05
"""What measures the link: round trips, and growing payloads until one takes so long."""


@dataclass(frozen=True)
class LinkSpeed:
    """The link between the starter and a worker.

    Attributes:
        latency: one-way seconds.
        bandwidth: bytes/s.
    """

    latency: float
    bandwidth: float


class WorkerLink:
    """One worker, as its starter knows it. `run` keeps the conversation up until it is cancelled.

    Args:
        line: the worker's.
        own_id: the starter's peer id.
        name: the starter's name, which the worker shows.
        open_stream: opens a stream to the worker. Raises `RemoteError`.

    Attributes:
        on_change: called with this link when any of the other attributes has changed.
        report: what its device was when it was asked last; None before.
        speed: of the link to it; None before it was measured.
        event: what it did last.
        error: why it cannot be reached, or has refused; None while it is connected.
        lost_since: monotonic time since when it is not connected.
    """

    def __init__(
        self,
        line: WorkerLine,
        own_id: str,
        name: str,
        open_stream: Callable[[str], Awaitable[Stream]],
    ) -> None:
        self.line = line
        self.on_change: Callable[[WorkerLink], None] = lambda link: None
        self.report: DeviceReport | None = None
        self.speed: LinkSpeed | None = None
        self.event: WorkerEvent = IDLE
        self.error: RemoteError | None = None
        self.lost_since = time.monotonic()
        self._own_id = own_id
        self._name = name
        self._open_stream = open_stream
        self._stream: Stream | None = None
        self._assignment: Assign | None = None
        self._answers: asyncio.Queue[messages.WorkerMessage] = asyncio.Queue()

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @property
    def assignment(self) -> Assign | None:
        """What it was assigned last."""
        return self._assignment

    @property
    def server_id(self) -> str | None:
        """Peer id of its server, if that is online with what it was assigned last."""
        return self.event.server_id if self._is_about_assignment and self.event.state == "online" else None

    @property
    def failure(self) -> str | None:
        """Why it could not do what it was assigned last; None if it could, or has not tried."""
        return self.event.message if self._is_about_assignment and self.event.state == "failed" else None

    @property
    def _is_about_assignment(self) -> bool:
        return self._assignment is not None and self.event.number == self._assignment.number

    async def run(self) -> None:
        """Connect, and connect again whenever the worker is lost."""
        while True:
            try:
                await self._converse()
            except RemoteError as error:
                self.error = error
                logger.debug("worker %s is lost: %s", self.line, error)
            if self._stream is not None:
                self._stream = None
                self.lost_since = time.monotonic()
            self.on_change(self)
            await asyncio.sleep(RETRY_REFUSED_S if isinstance(self.error, PairingRefused) else RETRY_S)

    async def assign(self, assignment: Assign) -> None:
        """Assign something; if the worker is lost, it hears of it as soon as it is back."""
        self._assignment = assignment
        if self._stream is not None:
            with suppress(PeerLost):  # the conversation ends, too
                await self._stream.send(assignment)

    async def release(self, unpair: bool = False) -> bool:
        """End the assignment, and wait until the worker has done so. False if it is lost, or does not answer."""
        self._assignment = None
        if self._stream is None:
            return False
        try:
            await self._ask(messages.Release(unpair), messages.Released, RELEASE_TIMEOUT_S)
        except RemoteError as error:
            logger.debug("worker %s was not released: %s", self.line, error)
            return False
        return True

    async def _converse(self) -> None:
        """One conversation. Raises `RemoteError` when it ends."""
        stream = await self._open_stream(self.line.peer_id)
        try:
            try:
                async with asyncio.timeout(PAIRING_TIMEOUT_S):
                    await self._pair(stream)
            except TimeoutError:
                raise PeerLost(f"worker {self.line} did not pair within {PAIRING_TIMEOUT_S:g} s") from None
            async with asyncio.TaskGroup() as group:
                group.create_task(show_life(stream))
                group.create_task(self._listen(stream))
                group.create_task(self._begin(stream))
        except* RemoteError as errors:
            raise _first(errors) from None
        finally:
            stream.close()

    async def _pair(self, stream: Stream) -> None:
        challenge = await self._expect(stream, messages.WorkerChallenge)
        await stream.send(answer_challenge(challenge, self.line, self._own_id, self._name))
        await self._expect(stream, messages.Paired)

    async def _expect(self, stream: Stream, kind: type[R]) -> R:
        message, _ = await receive(stream, PAIRING_TIMEOUT_S, max_payload=0)
        if isinstance(message, messages.Refusal):
            raise remote_error(message.code, f"worker {self.line} refuses: {message.message}")
        if not isinstance(message, kind):
            raise ProtocolViolation(f"worker {self.line} sent a {type(message).__name__} in place of {kind.__name__}")
        return message

    async def _begin(self, stream: Stream) -> None:
        """Learn what the worker is, and repeat what it was assigned."""
        self._answers = asyncio.Queue()
        self.report = await self._ask(messages.DescribeDevice(), messages.DeviceReport, ANSWER_TIMEOUT_S, stream)
        if self.speed is None:
            self.speed = await self._measure(stream)
        self._stream, self.error = stream, None  # first, so that a release from now on follows what is sent here
        if self._assignment is not None:
            await stream.send(self._assignment)
        self.on_change(self)

    async def _listen(self, stream: Stream) -> None:
        while True:
            message, _ = await receive(stream)
            match message:
                case messages.StillHere():
                    pass
                case WorkerEvent():
                    self.event = message
                    self.on_change(self)
                case messages.Refusal():
                    raise remote_error(message.code, f"worker {self.line} refuses: {message.message}")
                case _:
                    self._answers.put_nowait(message)

    async def _ask(
        self,
        request: messages.Message,
        kind: type[R],
        timeout_s: float,
        stream: Stream | None = None,
        payload: bytes = b"",
    ) -> R:
        """Send a request, and wait for its answer: there is one at a time."""
        stream = stream or self._stream
        if stream is None:
            raise PeerLost(f"worker {self.line} is not connected")
        await stream.send(request, payload)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise PeerLost(f"worker {self.line} did not answer within {timeout_s:g} s") from None
        if not isinstance(answer, kind):
            raise ProtocolViolation(f"worker {self.line} answered with a {type(answer).__name__}")
        return answer

    async def _measure(self, stream: Stream) -> LinkSpeed:
        times = [await self._probe(stream, 0) for _ in range(PINGS)]
        round_trip = min(times[1:])
        for size in PROBE_SIZES_BYTES:
            taken = max(await self._probe(stream, size) - round_trip, 1e-6)
            if taken > max(MIN_PROBE_S, 4 * round_trip):
                break
        return LinkSpeed(round_trip / 2, size / taken)

    async def _probe(self, stream: Stream, size: int) -> float:
        began = time.perf_counter()
        await self._ask(messages.ProbeRequest(0), messages.ProbeReply, ANSWER_TIMEOUT_S, stream, bytes(size))
        return time.perf_counter() - began


def _first(errors: BaseExceptionGroup[RemoteError]) -> RemoteError:
    """One of the errors of tasks that ended together: what the worker said, rather than that the stream has ended."""
    found: list[RemoteError] = []
    pending: list[BaseException] = list(errors.exceptions)
    while pending:
        one = pending.pop(0)
        if isinstance(one, BaseExceptionGroup):
            pending.extend(one.exceptions)
        elif isinstance(one, RemoteError):
            found.append(one)
    return min(found, key=lambda one: isinstance(one, PeerLost))
