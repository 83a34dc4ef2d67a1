"""Servers that follow a script, and what a client may hear from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, Span, StepLayout, WireFormat
from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.protocol.input_checksum import input_checksum
from swarm.routing.router import Alternative
from swarm.transport.stream import Stream
from tests import virtual_time
from tests.infos import server_info
from tests.memory_hub import MemoryHub, MemoryNetwork

HIDDEN = 4
LAYOUT = StepLayout((0, 0), (2, 1))
MANNER = RequestOptions("main", WireFormat.FLOAT16, 60.0)
INPUT = PackedHidden(b"i" * 48, 3, HIDDEN, WireFormat.NONE, "float32")
OUTPUT = b"o" * 24
"""Three tokens of four values in 16 bits."""

RIGHT = bytes(32)
"""Stands for the checksum of the request that is answered."""

KEPT = (messages.AdaptersStored(600.0), b"")
OPENED = (messages.SessionOpened(0), b"")
Answer = tuple[Any, bytes] | str | None
"""A reply and its payload, None for silence, or "hang up"."""


def reply(step: int = 0, payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(
        messages.StepReply(step, WireFormat.FLOAT16, "float32", 1.0, RIGHT), **changes
    ), payload


def forward_reply(payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(messages.ForwardReply(WireFormat.FLOAT16, "float32", 1.0), **changes), payload


def replay_reply(payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(messages.ReplayReply(WireFormat.FLOAT16, "float32", 1.0, RIGHT), **changes), payload


def backward_reply(payload: bytes = OUTPUT, **changes: object) -> Answer:
    return msgspec.structs.replace(messages.BackwardReply(WireFormat.FLOAT16, "float32", 1.0), **changes), payload


def refusal(error: Exception) -> Answer:
    return messages.refusal(error), b""


class FakeServer:
    """Answers the first request of each stream with the first answer, and so on; then it is silent.

    Links and the end of a session are no requests: nobody answers them.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.requests: list[tuple[messages.ClientMessage, bytes]] = []
        self.streams: list[Stream] = []
        self.open_streams = 0

    async def __call__(self, stream: Stream) -> None:
        self.open_streams += 1
        self.streams.append(stream)
        answers = iter(self.answers)
        try:
            while True:
                frame = await stream.receive()
                message = messages.decode_client(frame.header)
                self.requests.append((message, bytes(frame.payload)))
                if isinstance(message, messages.SetNeighbors | messages.CloseSession):
                    continue
                answer = next(answers, None)
                if answer == "hang up":
                    return
                if answer is not None:
                    await stream.send(*_with_checksum(answer, message, frame.payload))
        except PeerLost:
            pass
        finally:
            stream.close()
            self.open_streams -= 1

    async def say(self, *answer: Any) -> None:
        """Something that nobody has asked for."""
        await self.streams[-1].send(*answer)
        await asyncio.sleep(0.1)

    @property
    def asked(self) -> list[type]:
        return [type(message) for message, _ in self.requests]


def _with_checksum(answer: Any, request: Any, payload: Any) -> Any:
    reply, rest = answer
    if getattr(reply, "input_checksum", None) == RIGHT and isinstance(
        request, messages.StepRequest | messages.ReplayRequest
    ):
        return msgspec.structs.replace(reply, input_checksum=input_checksum(request, payload)), rest
    return answer


def hop(name: str = "server", span: Span | None = None, **announced: Any) -> Hop:
    span = span or Span(0, 3)
    return Hop(server_info(span.start, span.end, name, **{"throughput": 1e4, **announced}), span)


class FakeSwarm:
    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.network = MemoryNetwork(self.hub, "client")

    async def add(self, *answers: Answer, name: str = "server") -> FakeServer:
        server = FakeServer(*answers)
        await MemoryNetwork(self.hub, name).serve(server)
        return server


class NoRoutes:
    """A route source of sessions whose servers are given."""

    missing_blocks_timeout = 0.0

    async def route(
        self, span: Span, before: str | None, after: str | None, max_length: int, avoid: frozenset[str] = frozenset()
    ) -> Route:
        raise NotImplementedError

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> Alternative | None:
        return None

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None: ...

    def offers(self, hop: Hop) -> bool:
        return True

    def note_overtaken(self, hop: Hop, seconds: float, tokens: int) -> None: ...

    async def refresh(self) -> None:
        raise NotImplementedError

    def report_failure(self, peer_id: str, error: Exception) -> None: ...

    def report_success(self, peer_id: str) -> None: ...

    def timeout_factor(self, peer_id: str) -> float:
        return 1.0

    def may_push(self, before: str, after: str) -> bool:
        return True

    def distrust_link(self, before: str, after: str) -> None: ...

    def report_route(self, route: Route) -> None: ...


def context(swarm: FakeSwarm, options: RequestOptions = MANNER, adapter: AdapterUpload | None = None) -> SessionContext:
    """What the hops of a session in `swarm` have in common."""
    return SessionContext(swarm.network, NoRoutes(), options, Span(0, 3), 100, adapter or AdapterUpload())


def run(scenario: Callable[[FakeSwarm], Awaitable[None]]) -> None:
    """A scenario on virtual time, at whose end nothing runs any more that it did not leave open itself."""
    virtual_time.run(lambda: scenario(FakeSwarm()))


def bad_payloads(answer: Callable[..., Answer]) -> list[tuple[str, Answer, str]]:
    """What a server may send instead of the outputs that are due: name, answer, complaint."""
    nan = {
        WireFormat.NONE: b"\xff" * 48,
        WireFormat.FLOAT16: b"\xff" * 24,
        WireFormat.BFLOAT16: b"\xff" * 24,
        WireFormat.BLOCKWISE8: b"\0" * 12 + b"\xff" * 4,
    }
    return [
        ("nothing", answer(b""), "0 bytes where 24 were due"),
        ("too short", answer(OUTPUT[:-1]), "23 bytes where 24"),
        ("too long", answer(OUTPUT + b"x"), "25 bytes where 24"),
        ("another format", answer(format=WireFormat.NONE), "24 bytes where 48"),
        ("unknown dtype", answer(dtype="float64"), "unknown format"),
        ("10 MB", answer(bytes(10 << 20)), "payload of 10485760 bytes"),
        ("infinity", answer(b"\0\x7c" * 12), "not finite"),
        *[(f"NaN as {wire}", answer(payload, format=wire), "not finite") for wire, payload in nan.items()],
    ]


BAD_REPLIES = [
    ("wrong type", (messages.InfoReply(0, 3, 0, 0, "1"), b""), "unexpected InfoReply"),
    ("reply to another request", OPENED, "unexpected SessionOpened"),
    ("garbage", (msgspec.Raw(b"\xc1"), b""), "not a valid reply"),
    ("request instead of a reply", (messages.InfoRequest(), b""), "not a valid reply"),
    ("more than could be right", (messages.InfoRequest(), b"x" * 1000), "payload of 1000 bytes"),
]
"""Wrong in answer to anything: name, answer, complaint."""
