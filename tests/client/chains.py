"""Chains of a client over real handlers in memory, on virtual time, with faults wherever a test wants them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.routes.events import SessionEvent
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, ServerInfo, Span, StepLayout, WireFormat
from swarm.errors import ProtocolViolation
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.routing.peer_health import PeerFailure
from swarm.routing.router import Alternative, Router
from swarm.server.compute.engine import Engine
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from swarm.transport.stream import Stream, StreamHandler
from tests import virtual_time
from tests.infos import server_info
from tests.memory_hub import MemoryHub, MemoryNetwork
from tests.virtual_time import InlineRuntime

CLIENT, REVISION = "client", "main"
NAMES = ["a", "b", "c"]
ONCE = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
TWICE = {**ONCE, "a2": (0, 2), "b2": (2, 4), "c2": (4, 6)}
BLOCKS, HIDDEN = 6, 32
MAX_LENGTH = 64
TOLERANCE = 1e-4

Frame = tuple[messages.Message, bytes | memoryview]
Tamper = Callable[[messages.Message, bytes | memoryview], Frame]


HONEST: Tamper = lambda message, payload: (message, payload)  # noqa: E731


class Server:
    """A real handler with a span of the model, and what it was sent.

    Args:
        older: it does not notice that it is its own neighbor, and tries to push to itself over the network.

    Attributes:
        tamper: changes what it sends, to clients and to the next server.
        heard: messages that arrived, with the peers that sent them.
    """

    def __init__(self, hub: MemoryHub, model: SpanModel, info: ServerInfo, seconds: float, older: bool = False) -> None:
        self.info = info
        self.runtime = InlineRuntime(seconds)
        runtime: Any = self.runtime
        self.sessions = SessionTable(1 << 16, time.monotonic)
        self.network = MemoryNetwork(hub, info.peer_id)
        network = _TappedNetwork(self, "a peer it has never heard of" if older else info.peer_id)
        self.handler = MessageHandler(network, model.narrowed(info.span), REVISION, self.sessions, Engine(runtime))
        self.tamper: Tamper = HONEST
        self.heard: list[tuple[str, messages.ClientMessage]] = []

    async def serve(self, stream: Stream) -> None:
        await self.handler(_Tapped(self, stream))

    def count(self, kind: type) -> int:
        """Messages of a kind that arrived."""
        return sum(isinstance(message, kind) for _, message in self.heard)


class _Tapped:
    """A server's end of a stream, watched."""

    def __init__(self, server: Server, stream: Stream) -> None:
        self.peer_id = stream.peer_id
        self._server = server
        self._stream = stream

    async def receive(self, max_payload: Any = 0, admit: Any = None) -> Any:
        frame = await self._stream.receive(max_payload, admit)
        with suppress(ProtocolViolation):  # a server hears refusals of what it has pushed, too
            self._server.heard.append((self.peer_id, messages.decode_client(frame.header)))
        return frame

    async def send(
        self, message: messages.Message, payload: bytes | memoryview = b"", timeout_s: float | None = None
    ) -> None:
        await self._stream.send(*self._server.tamper(message, payload), timeout_s)

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()


class _TappedNetwork:
    """A server's network, watched."""

    def __init__(self, server: Server, peer_id: str) -> None:
        self.peer_id = peer_id
        self._server = server

    async def open_stream(self, peer_id: str) -> Stream:
        return _Tapped(self._server, await self._server.network.open_stream(peer_id))

    async def serve(self, handler: StreamHandler) -> None:
        raise NotImplementedError

    def knows(self, peer_id: str) -> bool:
        return self._server.network.knows(peer_id)


class RoutingPlanner:
    """A planner that sees what the test announces, through a real router.

    Attributes:
        failures: who failed, and why.
        distrusted: links of which one end lied.
        overtaken: whose place others took because they were quicker.
        routes: that were taken.
        has_alternatives: whether others can be asked beside a server that is late.
    """

    def __init__(self, announced: Callable[[], Sequence[ServerInfo]], missing_blocks_timeout: float) -> None:
        self.missing_blocks_timeout = missing_blocks_timeout
        self.router = Router()
        self.failures: list[tuple[str, Exception]] = []
        self.distrusted: list[tuple[str, str]] = []
        self.overtaken: list[str] = []
        self.has_alternatives = True
        self.routes: list[str] = []
        self.refreshed = 0
        self._announced = announced

    async def route(
        self, span: Span, before: str | None, after: str | None, max_length: int, avoid: frozenset[str] = frozenset()
    ) -> Route:
        if not self.refreshed:
            await self.refresh()
        return self.router.route(
            span, time.monotonic(), before=before, after=after, avoid=avoid, cache_tokens=max_length
        )

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> Alternative | None:
        if not self.has_alternatives:
            return None
        return self.router.alternative(current, time.monotonic(), before, after, max_length)

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None:
        self.router.note_step(hop, seconds, tokens, time.monotonic())

    def offers(self, hop: Hop) -> bool:
        return self.router.offers(hop, time.monotonic())

    def note_overtaken(self, hop: Hop, seconds: float, tokens: int) -> None:
        self.overtaken.append(hop.server.peer_id)
        self.router.note_step(hop, seconds, tokens, time.monotonic(), overtaken=True)

    async def refresh(self) -> None:
        self.refreshed += 1
        self.router.update(self._announced())

    def report_failure(self, peer_id: str, error: Exception) -> None:
        self.failures.append((peer_id, error))
        self.router.health.record_failure(peer_id, PeerFailure.UNREACHABLE, time.monotonic())

    def report_success(self, peer_id: str) -> None:
        self.router.health.record_success(peer_id, time.monotonic())

    def timeout_factor(self, peer_id: str) -> float:
        return 1.0

    def may_push(self, before: str, after: str) -> bool:
        return self.router.may_push(before, after, time.monotonic())

    def distrust_link(self, before: str, after: str) -> None:
        self.distrusted.append((before, after))
        self.router.links.distrust(before, after, time.monotonic())

    def report_route(self, route: Route) -> None:
        self.routes.append(" ".join(f"{hop.span}@{hop.server.peer_id}" for hop in route.hops))


OnMessage = Callable[[str, str, messages.Message], bool]
"""Sees each message before it leaves: source, target, message. True loses it."""


class Swarm:
    """Servers of one model in memory, and one client.

    Args:
        model: all blocks.
        servers: name -> (start, end). The first ones are the faster ones, which the router prefers.
        missing_blocks_timeout: seconds that the client waits for blocks that no server holds.
        push: see `RequestOptions`.
        seconds: that a server computes for one step.
        older: see `Server`.
    """

    def __init__(
        self,
        model: SpanModel,
        servers: dict[str, tuple[int, int]],
        *,
        missing_blocks_timeout: float = 3600.0,
        push: bool = True,
        seconds: float = 0.01,
        wire: WireFormat = WireFormat.NONE,
        older: bool = False,
    ) -> None:
        self.model = model
        self.hub = MemoryHub(lambda source, target: 0.01, self._on_message)
        self.network = MemoryNetwork(self.hub, CLIENT)
        self.manner = RequestOptions(REVISION, wire, 60.0, push)
        self.announced: dict[str, ServerInfo] = {}
        self.servers: dict[str, Server] = {}
        self.killed: set[str] = set()
        self.events: list[SessionEvent] = []
        self.planner = RoutingPlanner(lambda: list(self.announced.values()), missing_blocks_timeout)
        self.on_message: OnMessage = lambda source, target, message: False
        self._seconds = seconds
        self._older = older
        self._wanted = servers

    async def start(self) -> None:
        for name, (start, end) in self._wanted.items():
            await self.add(name, start, end)

    async def add(self, name: str, start: int, end: int) -> Server:
        throughput = self.announced[name].throughput if name in self.announced else 1e4 * 0.5 ** len(self.announced)
        info = server_info(start, end, name, throughput=throughput, forward_throughput=1e4)
        self.announced[name] = info
        server = self.servers[name] = Server(self.hub, self.model, info, self._seconds, self._older)
        await server.network.serve(server.serve)
        return server

    def kill(self, name: str) -> None:
        self.killed.add(name)
        self.hub.kill(name)

    def kill_soon(self, name: str, seconds: float = 0.015) -> None:
        """Once what it has just sent has arrived."""
        asyncio.get_running_loop().call_later(seconds, self.kill, name)

    async def chain(self, early_exits: bool = False) -> Conversation:
        span, emit = Span(0, BLOCKS), self.events.append
        chain = Chain(
            SessionContext(
                self.network,
                self.planner,
                self.manner,
                span,
                MAX_LENGTH,
                emit=emit,
                early_exits=early_exits,
            )
        )
        await chain.open()
        return Conversation(self.model, chain)

    def _on_message(self, source: str, target: str, message: messages.Message) -> bool:
        return self.on_message(source, target, message)


@dataclass
class Conversation:
    """A chain, and what its outputs have to be: each row's whole history computed again by the undisturbed model.

    Attributes:
        caps: how far back the next step has to begin in each row, because of steps that were given up.
        exits: makes every token of `stream` leave in front of one block, if the servers have an exit there.
        left: copies of steps whose tokens had left.
    """

    model: SpanModel
    chain: Chain
    histories: list[torch.Tensor] = field(default_factory=list)
    caps: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    exits: messages.ExitTerms | None = None
    left: int = 0

    @property
    def lengths(self) -> list[int]:
        return [len(history) for history in self.histories]

    async def append(self, *counts: int) -> None:
        """The next step, as many new tokens for each row."""
        lengths = [*self.lengths, *[0] * len(counts)][: len(counts)]
        await self.step(StepLayout(tuple(lengths), counts))

    async def prefill(self, *chunks: tuple[int, ...]) -> None:
        """Steps that are under way at once, as many new tokens for each row as each of them says."""
        lengths = [*self.lengths, *[0] * len(chunks[0])][: len(chunks[0])]
        layouts = []
        for counts in chunks:
            layouts.append(StepLayout(tuple(lengths), counts))
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        await self.step(*layouts)

    async def step(self, *layouts: StepLayout) -> None:
        """Steps whose outputs are checked. Those that fail do not count."""
        hiddens = [torch.randn(layout.tokens, HIDDEN, generator=self.random) for layout in layouts]
        if layouts[0].sources is None:
            starts = dict(enumerate(layouts[0].starts))
            self.caps = [min(cap, starts.get(row, 0)) for row, cap in enumerate(self.caps)]
        results = await self.chain.steps(list(zip(map(_packed, hiddens), layouts, strict=True)))
        for layout, hidden, result in zip(layouts, hiddens, results, strict=True):
            self.histories = _after(self.histories, hidden, layout)
            self.check(layout, result)
        self.caps = self.lengths

    async def begin_step(self, layout: StepLayout, exit_block: int | None = None) -> int:
        """Send a step off, which is taken as if it stood; its number."""
        hidden = torch.randn(layout.tokens, HIDDEN, generator=self.random)
        self.histories = _after(self.histories, hidden, layout)
        self.caps = self.lengths
        return await self.chain.begin(_packed(hidden), layout, exit_block=exit_block)

    async def stream(self, chance: random.Random, turns: int) -> None:
        """Steps that are sent before the last server has answered those before; some of them are given up.

        Outputs are checked where they come by, and those that are left in the end count.
        """
        under_way: list[_UnderWay] = []
        limits = [*self.caps] or [0] * chance.randint(1, 3)
        try:
            for _ in range(turns):
                turn = chance.random()
                if turn < 0.5 or not under_way:
                    limits = await self._begin(chance, under_way, limits)
                elif turn < 0.6:
                    kept = chance.randrange(len(under_way))
                    given_up, under_way[kept:] = under_way[kept:], []
                    below = _limits(under_way[-1].histories if under_way else self.histories, given_up)
                    limits = _lower(limits, below)  # perhaps the second time
                    await self.chain.give_up_under_way(given_up[0].number - 1)
                elif turn < 0.8:
                    await self._look_at(chance.choice(under_way), chance.choice([*self.chain.route.boundaries, BLOCKS]))
                else:
                    await self._settle(under_way)
            while under_way:
                await self._settle(under_way)
            self.caps = limits
        except BaseException:
            if under_way:
                self.chain.give_up_after(under_way[0].number - 1)
                limits = _lower(limits, _limits(self.histories, under_way))
            self.caps = limits
            raise

    async def _begin(self, chance: random.Random, under_way: list[_UnderWay], limits: list[int]) -> list[int]:
        starts = tuple(limit if chance.random() < 0.9 else chance.randint(0, limit) for limit in limits)
        counts = tuple(chance.choice([1, 1, 1, 0, 2 if self.exits is None else 1]) for _ in limits)
        layout = StepLayout(starts, counts if any(counts) else (1,) * len(counts))
        hidden = torch.randn(layout.tokens, HIDDEN, generator=self.random)
        before = under_way[-1].histories if under_way else self.histories
        one = _UnderWay(-1, layout, _after(before, hidden, layout))
        under_way.append(one)  # also if it fails: servers may have got it
        one.number = self.chain.next_number
        exit_block = chance.choice([None, *self.chain.route.boundaries])
        assert await self.chain.begin(_packed(hidden), layout, self.exits, exit_block) == one.number
        return [len(history) for history in one.histories]

    async def _settle(self, under_way: list[_UnderWay]) -> None:
        first = under_way[0]
        await self._look_at(first, BLOCKS)
        self.chain.settle(first.number)
        self.histories = first.histories
        del under_way[0]

    async def _look_at(self, one: _UnderWay, block: int) -> None:
        """What a step is in front of a block; nothing if the servers change meanwhile, and none ends there any more."""
        await self.chain.wait(lambda: self.chain.outputs(one.number, block) is not None)
        found = self.chain.outputs(one.number, block)
        assert found is not None or block != BLOCKS
        if found is None:
            return
        left = None
        if self.exits is not None:
            ((block, _),) = self.exits.thresholds
            left = tuple(block * count for count in one.layout.counts)
            self.left += 1
        assert found.left == left
        self.check(one.layout, found, one.histories, self.model.narrowed(Span(0, block)))

    def check(
        self,
        layout: StepLayout,
        result: PackedHidden,
        histories: Sequence[torch.Tensor] | None = None,
        model: SpanModel | None = None,
    ) -> None:
        """Outputs of the step after which the rows are `histories` (None: what they are now)."""
        histories, model = histories or self.histories, model or self.model
        outputs = decode_tensor(result.payload, result.tokens, HIDDEN, result.wire, result.dtype, torch.device("cpu"))
        expected = torch.cat(
            [
                model.forward(history.unsqueeze(0))[0, len(history) - count :]
                for history, count in zip(histories, layout.counts, strict=True)
                if count
            ]
        )
        torch.testing.assert_close(outputs, expected, rtol=0, atol=TOLERANCE * max(1.0, float(expected.abs().max())))


@dataclass
class _UnderWay:
    """A step that is under way: its number, its layout, and the rows after it."""

    number: int
    layout: StepLayout
    histories: list[torch.Tensor]


def _limits(histories: Sequence[torch.Tensor], given_up: Sequence[_UnderWay]) -> list[int]:
    """How far back the next step has to begin in each row, after steps that were given up."""
    rows = [len(history) for history in histories] or [0] * len(given_up[0].layout.starts)
    return [min([length, *(one.layout.starts[row] for one in given_up)]) for row, length in enumerate(rows)]


def _lower(limits: Sequence[int], others: Sequence[int]) -> list[int]:
    return [min(pair) for pair in zip(limits, others, strict=True)]


def _packed(hidden: torch.Tensor) -> PackedHidden:
    return PackedHidden(encode_tensor(hidden, WireFormat.NONE), len(hidden), HIDDEN, WireFormat.NONE, "float32")


def _after(histories: list[torch.Tensor], hidden: torch.Tensor, layout: StepLayout) -> list[torch.Tensor]:
    """The rows after a step."""
    nothing = torch.empty(0, HIDDEN)
    sources = layout.sources if layout.sources is not None else range(layout.sequences)
    pasts = [histories[source] if source < len(histories) else nothing for source in sources]
    news = hidden.split(layout.counts)
    return [torch.cat([past[:start], new]) for past, start, new in zip(pasts, layout.starts, news, strict=True)]


def now() -> float:
    return asyncio.get_running_loop().time()


def disturb(
    model: SpanModel,
    act: Callable[[Swarm, Conversation], Awaitable[None]],
    servers: dict[str, tuple[int, int]] = TWICE,
    measured: int = 0,
    **options: Any,
) -> None:
    """Let `act` disturb a session that has made its first steps, and look whether it goes on and is freed.

    Args:
        measured: tokens before that, from which it is known how long a step takes.
        options: of the `Swarm`.
    """

    async def scenario() -> None:
        swarm = Swarm(model, servers, **options)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(3, 5)
        await talk.step(StepLayout((5, 3), (1, 1), (1, 0)))
        for _ in range(measured):
            await talk.append(1, 1)
        assert swarm.planner.overtaken == []
        await act(swarm, talk)
        swarm.on_message = lambda source, target, message: False
        await talk.append(1, 1)
        await talk.step(StepLayout((2, 3), (1, 1), (1, 0)))
        await talk.chain.close()
        await asyncio.sleep(5)
        for name, server in swarm.servers.items():
            if name not in swarm.hub._hanging | swarm.killed:
                assert len(server.sessions) == 0, name

    virtual_time.run(scenario)


def converse(
    model: SpanModel,
    act: Callable[[Swarm, Conversation], Awaitable[None]],
    servers: dict[str, tuple[int, int]] = ONCE,
    **options: Any,
) -> None:
    """Run `act(swarm, talk)` on virtual time with a chain that has just been opened; `options` are the swarm's."""

    async def scenario() -> None:
        swarm = Swarm(model, servers, **options)
        await swarm.start()
        await act(swarm, await swarm.chain())

    virtual_time.run(scenario)
