"""Conversations with one real server, by streams in memory and by hand: what the tests of its room share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from swarm.data_structures import Span, WireFormat
from swarm.errors import PeerLost
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor, payload_bytes
from swarm.protocol.input_checksum import input_checksum
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine
from swarm.server.sessions.adapter_store import AdapterLimits, AdapterStore
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.request_validation import RequestLimits
from swarm.server.sessions.session import Session
from swarm.server.sessions.session_table import CacheSizes, SessionTable
from tests import virtual_time, zoo
from tests.async_tests import as_test
from tests.memory_hub import MemoryHub, MemoryNetwork
from tests.virtual_time import InlineRuntime

HIDDEN, SPAN, REVISION = 32, Span(1, 4), "main"
ADAPTERS = AdapterLimits(rank=8, memory=200_000, seconds=100.0)
CPU = torch.device("cpu")
PATIENCE = 60.0
OPEN = messages.OpenSession(b"hostile-session!", REVISION, SPAN.start, SPAN.end, 8, WireFormat.NONE)
STEP = messages.StepRequest(1, [2], [1], WireFormat.NONE, "float32")
"""The right step after the two tokens that `Client.begin` sends."""
FORWARD = messages.ForwardRequest(REVISION, SPAN.start, SPAN.end, [2, 1], WireFormat.NONE, "float32", WireFormat.NONE)


def even_sizes(span: Span, buffer: int = 0) -> CacheSizes:
    """Blocks that keep one unit of memory of each token, beside a buffer of so many."""
    return CacheSizes(span, (1,) * span.length, (0,) * span.length, buffer, 0, span.length + buffer)


def changed(message: Any, **changes: object) -> Any:
    return msgspec.structs.replace(message, **changes)


def raw(data: bytes) -> Any:
    """A header of just these bytes."""
    return msgspec.Raw(data)


def random(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def make_model(folder: Path) -> SpanModel:
    """Blocks of a tiny model, whose checkpoint is saved in `folder`."""
    return load_span(open_checkpoint(zoo.make_checkpoint("llama", folder)), SPAN, dtype=torch.float32, device=CPU)


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


class Server:
    """One server, "server". `now` is its sessions' clock."""

    def __init__(
        self,
        model: SpanModel,
        capacity: int = 64,
        runtime: Any = None,
        budget: int = 64,
        peer_share: float = 1.0,
        **limits: int,
    ) -> None:
        self.model = model
        self.now = 0.0
        self.hub = MemoryHub()
        self.runtime = runtime or ComputeThread()
        self.sessions = SessionTable(capacity, lambda: self.now, peer_share, sizes=even_sizes(model.span))
        self.network = MemoryNetwork(self.hub, "server")
        engine, bounds = (
            Engine(self.runtime, budget),
            RequestLimits(**{"step_tokens": 16, "backward_tokens": 12, **limits}),
        )
        self.adapters = AdapterStore(lambda: self.now, ADAPTERS)
        self.handler = MessageHandler(self.network, model, REVISION, self.sessions, engine, bounds, self.adapters)

    async def start(self) -> None:
        await self.network.serve(self.handler)

    async def stop(self) -> None:
        self.runtime.close()
        await self.hub.close()
        self.sessions.clear()

    def session(self, client: str = "hostile") -> Session:
        """The one session of a client."""
        (session,) = [one for one in self.sessions._sessions.values() if one.terms.peer_id == client]
        return session

    async def client(self, name: str = "hostile") -> Client:
        return Client(self.model, await MemoryNetwork(self.hub, name).open_stream("server"))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0)


class Client:
    """One stream, by hand, and what has been sent through it."""

    def __init__(self, model: SpanModel, stream: Any) -> None:
        self.model = model
        self.stream = stream
        self.history = torch.empty(0, HIDDEN)
        self.steps = 0

    async def ask(self, message: Any, payload: Any = b"") -> tuple[messages.ServerMessage, bytes]:
        await self.stream.send(message, payload)
        return await self.hear()

    async def begin(self, open_session: Any = OPEN, tokens: int = 2) -> Client:
        reply, _ = await self.ask(open_session)
        assert reply == messages.SessionOpened(0)
        await self.right_step(tokens)
        return self

    async def right_step(self, tokens: int = 1) -> messages.StepReply:
        """A step whose outputs are checked."""
        hidden = random(tokens, self.steps)
        request = self.next_step(tokens)
        sent = encode_tensor(hidden, WireFormat.NONE)
        reply, payload = await self.ask(request, sent)
        checked = self.check(reply, payload, hidden)
        assert checked.input_checksum == input_checksum(request, sent)
        return checked

    def next_step(self, tokens: int = 1) -> messages.StepRequest:
        """What `right_step` would ask for; its inputs are `random(tokens, self.steps)`."""
        return messages.StepRequest(self.steps, [len(self.history)], [tokens], WireFormat.NONE, "float32")

    def check(self, reply: messages.ServerMessage, payload: bytes, hidden: torch.Tensor) -> messages.StepReply:
        """An answer to the next step, which brought `hidden`, has the right outputs."""
        start, tokens = len(self.history), len(hidden)
        assert isinstance(reply, messages.StepReply), reply
        assert (reply.step, reply.format, reply.dtype) == (self.steps, WireFormat.NONE, "float32")
        self.history = torch.cat([self.history, hidden])
        self.steps += 1
        expected = self.model.forward(self.history.unsqueeze(0))[0, start:]
        assert_close(decode_tensor(payload, tokens, HIDDEN, WireFormat.NONE, "float32", CPU), expected)
        return reply

    async def hear(self) -> tuple[messages.ServerMessage, bytes]:
        """What the server says without being asked."""
        frame = await asyncio.wait_for(self.stream.receive(), PATIENCE)
        return messages.decode_server(frame.header), bytes(frame.payload)

    async def hears_nothing(self, seconds: float) -> None:
        """Only for virtual time."""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.stream.receive(), seconds)

    async def refused(self, code: str, message: Any, payload: Any = b"") -> str:
        """The refusal's text."""
        reply, rest = await self.ask(message, payload)
        assert isinstance(reply, messages.Refusal), reply
        assert (reply.code, rest) == (code, b"")
        # The client has to know which step is refused, because other answers may be under way.
        known = isinstance(message, messages.StepRequest) and code != "protocol_violation"
        assert reply.step == (message.step if known else None)
        assert reply.message
        return reply.message

    async def is_over(self) -> None:
        """The server has ended this stream."""
        with pytest.raises(PeerLost):
            await asyncio.wait_for(self.stream.receive(), PATIENCE)


Act = Callable[[Server], Awaitable[None]]


def scenario(model: SpanModel, act: Act, **options: Any) -> None:
    """Let `act` do its worst to a server, while another client works and goes on working."""

    async def besides(server: Server) -> None:
        good = await server.client("good")
        await good.begin(changed(OPEN, session_id=b"a decent session"))
        await act(server)
        await good.right_step()
        await good.right_step(2)

    alone(model, besides, **options)


def alone(model: SpanModel, act: Act, **options: Any) -> None:
    """Let `act` do what it likes to a server."""

    async def whole() -> None:
        server = Server(model, **options)
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await act(server)
        finally:
            await server.stop()

    asyncio.run(whole())


def on_virtual_time(model: SpanModel, act: Act, seconds: float = 0.0, **options: Any) -> None:
    """The same on virtual time; each job of the server takes so many seconds of it."""

    async def whole() -> None:
        server = Server(model, runtime=InlineRuntime(seconds), **options)
        await server.start()
        await act(server)
        await server.stop()

    virtual_time.run(whole)


beside_good_client, with_server, in_virtual_time = (
    as_test(run, "server", fixtures=("model",)) for run in (scenario, alone, on_virtual_time)
)


def bytes_of(tokens: int, wire: WireFormat = WireFormat.NONE) -> bytes:
    """A payload of the right length for so many tokens."""
    return bytes(payload_bytes(tokens * HIDDEN, wire, "float32"))
