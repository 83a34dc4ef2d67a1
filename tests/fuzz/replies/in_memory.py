"""Hostile servers against a client's own code in memory, on virtual time: no answer, and every wait, takes no time.

The servers are real handlers over a real span, the frames are real bytes; only the network is not. Hostile servers
hold blocks of which honest ones hold a copy, and look quicker than these.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swarm.client.chain.chain import Chain
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.adapter_upload import AdapterUpload, pack_adapter
from swarm.data_structures import Span, StepLayout
from swarm.errors import RemoteError
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.gradients import forward_with_graph
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.transport.ping import measure_bandwidth, ping_many
from tests import virtual_time, zoo
from tests.bad_peers import LyingPeer
from tests.client.batches.test_backward_pass import Batch, adapter
from tests.client.chains import BLOCKS, MAX_LENGTH, Conversation, Server, Swarm
from tests.client.test_chain_faults import next_step
from tests.client.test_exits_under_faults import EXIT, TERMS, Sure
from tests.fuzz.replies.hostile_streams import HostileStream, Mischief
from tests.memory_hub import MemoryNetwork

HOSTILE = {"mean w": (0, 2), "mean x": (2, 4), "mean y": (4, 6), "mean z": (1, 5)}
HONEST = {"a": (0, 3), "b": (3, 6), "c": (0, 6), "d": (0, 6)}

HOSTILE_RATE, HONEST_RATE = 1e5, 10.0
"""Blocks per second that they announce."""

LONGEST_CALL_S = 120.0
"""Virtual seconds that one call of the client may take: it tries several hostile servers one after the other, each
within its own limit."""

QUIET_S = 200.0
"""Virtual seconds after which nothing may be left of a conversation."""


class RepliesViolation(Exception):
    """Something that must not happen did."""


class HostileSwarm(Swarm):
    """Honest servers, and quicker hostile ones."""

    def __init__(self, model: SpanModel, mischief: Mischief, push: bool, has_exits: bool) -> None:
        shown = model.with_exits(Sure((EXIT,))) if has_exits else model
        super().__init__(shown, {**HOSTILE, **HONEST}, missing_blocks_timeout=60.0, push=push)
        self.mischief = mischief
        self.has_exits = has_exits

    async def add(self, name: str, start: int, end: int) -> Server:
        server = await super().add(name, start, end)
        rate = HOSTILE_RATE if name in HOSTILE else HONEST_RATE
        self.announced[name] = replace(self.announced[name], throughput=rate)
        if name in HOSTILE:

            def wrap(stream: Any) -> Any:
                return HostileStream(stream, self.mischief)

            async def serve(stream: Any) -> None:
                await server.serve(wrap(stream))

            network: Any = LyingPeer(server.network, wrap)
            server.network = network

            await MemoryNetwork(self.hub, name).serve(serve)
        return server

    async def talk(self, chance: random.Random) -> Conversation:
        """A conversation whose chain is not open yet: plain, with exits, or with an adapter."""
        kind = chance.choice(["plain", "plain", "exits" if self.has_exits else "adapter"])
        parts = adapter() if kind == "adapter" else {}
        context = SessionContext(
            self.network,
            self.planner,
            self.manner,
            Span(0, BLOCKS),
            MAX_LENGTH,
            AdapterUpload(pack_adapter(parts)),
            self.events.append,
            early_exits=kind == "exits",
        )
        model: Any = Adapted(self.model, parts) if parts else self.model
        talk = Conversation(model, Chain(context))
        talk.random.manual_seed(chance.getrandbits(32))
        talk.exits = TERMS if kind == "exits" else None
        return talk


@dataclass(frozen=True)
class Adapted:
    """A model with an adapter, as far as conversations use one."""

    model: SpanModel
    parts: dict[int, BlockAdapterWeights]

    def forward(self, hidden_STH: torch.Tensor) -> torch.Tensor:
        (hidden_TH,) = hidden_STH
        layout = StepLayout((0,), (len(hidden_TH),))
        return forward_with_graph(self.model, hidden_TH, layout, self.parts).detach().unsqueeze(0)

    def narrowed(self, span: Span) -> Adapted:
        return Adapted(self.model.narrowed(span), {block: one for block, one in self.parts.items() if block in span})


class Game:
    """One swarm, its client and what the client lives through."""

    def __init__(self, model: SpanModel, chance: random.Random, mischief: Mischief) -> None:
        self.chance = chance
        self.mischief = mischief
        self.swarm = HostileSwarm(model, mischief, chance.random() < 0.85, chance.random() < 0.2)
        mischief.make_forgiving(self.swarm.planner.router.health, HOSTILE)
        self.log: list[str] = []

    async def play(self) -> None:
        await self.swarm.start()
        before = asyncio.all_tasks()
        self.mischief.begin(self.chance)
        how = self.chance.choice(["talk"] * 6 + ["talks", "batch", "batch", "ping"])
        self.log.append(how)
        match how:
            case "talk":
                await self.converse(self.chance)
            case "talks":
                chances = [random.Random(self.chance.getrandbits(64)) for _ in range(3)]
                await asyncio.gather(*map(self.converse, chances))
            case "batch":
                await self.train()
            case "ping":
                await self.call(lambda: self.ping())
        self.mischief.enabled = False
        await self.expect_nothing_left(before)

    async def converse(self, chance: random.Random) -> None:
        """A session with steps of all kinds, some of them after a hostile server has forgotten it."""
        talk = await self.swarm.talk(chance)
        try:
            await self.call(talk.chain.open)
            for _ in range(chance.randint(2, 8)):
                if chance.random() < 0.15:
                    self.swarm.servers[chance.choice(list(HOSTILE))].sessions.clear()
                if chance.random() < 0.1:
                    self.swarm.planner.router.health._records.clear()
                done = await self.call(lambda: self.step(talk, chance))
                if not done:
                    break
        finally:
            await self.call(talk.chain.close)

    async def step(self, talk: Conversation, chance: random.Random) -> None:
        if talk.exits is not None:
            await talk.stream(chance, chance.randint(3, 10))
        else:
            await next_step(talk, chance)

    async def train(self) -> None:
        """A forward and backward pass without a session, with an adapter."""
        chance = self.chance
        batch = Batch(self.swarm, adapter())
        routes = [("mean w", "mean x", "mean y"), ("mean w", "mean z", "mean y"), ("c",), ("a", "b")]
        for _ in range(chance.randint(1, 3)):
            names = chance.choice(routes[:1] * 3 + routes[2:])
            batch.add(tuple(chance.randint(3, 5) for _ in range(chance.randint(1, 3))), *names)
        try:
            await self.call(batch.run)
        finally:
            batch.requester.close()

    async def ping(self) -> None:
        """What a client, and a server, measures of others."""
        found = await ping_many(self.swarm.network, [*HOSTILE, *HONEST])
        assert set(HONEST) <= set(found)
        for name in HOSTILE:
            with suppress(RemoteError):
                await measure_bandwidth(self.swarm.network, name)

    async def call(self, work: Callable[[], Awaitable[Any]]) -> bool:
        """Do it; false if it went wrong because a server may have lied about values, and nobody can tell."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            await work()
            return True
        except AssertionError:
            if not self.mischief.may_deceive:
                raise
            return False
        finally:
            if clock.time() - began > LONGEST_CALL_S:
                raise RepliesViolation(f"a call took {clock.time() - began:.0f} s")

    async def expect_nothing_left(self, before: set[asyncio.Task[Any]]) -> None:
        """Nobody honest is blamed; no task is left, and no reservation at honest servers."""
        swarm = self.swarm
        blamed = [f"{peer}: {error!r}" for peer, error in swarm.planner.failures if peer in HONEST]
        if blamed:
            raise RepliesViolation(f"honest servers were blamed: {blamed}")
        apart = [pair for pair in swarm.planner.distrusted if not set(pair) & set(HOSTILE)]
        if apart:
            raise RepliesViolation(f"honest servers are kept apart: {apart}")
        await asyncio.sleep(QUIET_S)
        for name in HOSTILE:  # who lies about an opening may keep the session
            sessions = swarm.servers[name].sessions
            for session in list(sessions._sessions.values()):
                sessions.close(session, "asked_to_leave")
        await asyncio.sleep(QUIET_S)
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        if left or swarm.hub.tasks:
            waiting = [f"{swarm.hub.tasks.get(task, 'a client')}: {where(task)}" for task in left]
            raise RepliesViolation(f"tasks are left: {waiting}")
        honest = {name: swarm.servers[name].sessions for name in HONEST}
        held = {name: sessions.capacity - sessions.free for name, sessions in honest.items()}
        if any(held.values()):
            raise RepliesViolation(f"sessions are left: {held}")


def where(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the lines of its coroutines, outermost first."""
    lines, awaited = [], task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is None:
            break
        lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = getattr(awaited, "cr_await", None)
    return " > ".join(lines)


def tiny_model(folder: Path) -> SpanModel:
    """A model whose checkpoint is written to the folder."""
    checkpoint = open_checkpoint(zoo.make_checkpoint("llama", folder / "tiny"))
    return load_span(checkpoint, Span(0, zoo.BLOCKS), dtype=torch.float32, device=torch.device("cpu"))


def play(model: SpanModel, seed: int, mischief: Mischief) -> Game:
    """One game; what goes wrong is raised with its seed and the lies that were told."""
    chance = random.Random(seed)
    game: list[Game] = []

    async def scenario() -> None:
        game.append(Game(model, chance, mischief))
        await game[0].play()

    try:
        virtual_time.run(scenario, limit=1e5)
    except BaseException as error:
        error.add_note(f"seed {seed}: {game[0].log}; lies: " + " | ".join(mischief.log))
        raise
    return game[0]
