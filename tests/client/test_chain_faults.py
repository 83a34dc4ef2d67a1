"""Sessions under random faults, on virtual time: whatever happens to the servers, the outputs stay right.

Every block is held by three servers or more. Messages are lost and delayed; servers die before or after anything they
say, hang, answer garbage, push garbage, forget their sessions, take back a session's cache, leave, take very long;
single streams break; the person interrupts. No exception may come out
but the interruption.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from swarm.data_structures import StepLayout
from swarm.protocol import messages
from tests import virtual_time
from tests.client.chains import BLOCKS, CLIENT, HONEST, Conversation, Server, Swarm
from tests.slow import slow_except

SERVERS = {
    "a": (0, 2), "b": (2, 4), "c": (4, 6),
    "d": (0, 3), "e": (3, 6), "f": (1, 5),
    "g": (0, 1), "h": (5, 6), "i": (0, 6),
}  # fmt: skip


FATAL = ("kill", "kill soon", "hang", "garbage", "stuck")
"""Faults after which a server is of no use any more."""


class Mischief:
    """Faults at random messages of a swarm.

    Args:
        faults: how many.
        rate: share of the messages at which one happens, while any are left.
    """

    def __init__(self, swarm: Swarm, chance: random.Random, faults: int, rate: float, lossy: bool) -> None:
        self.swarm = swarm
        self.chance = chance
        self.left = faults
        self.rate = rate
        self.log: list[str] = []
        self.stopped: set[str] = set()
        self.kinds = [*FATAL, "garbage once", "forget", "reclaim", "leave", "slow", "break off"]
        self.kinds += ["lose"] * 2 if lossy else []

    def __call__(self, source: str, target: str, message: messages.Message) -> bool:
        names = [name for name in (source, target) if name != CLIENT and name not in self.stopped]
        if not self.left or not names or self.chance.random() > self.rate:
            return False
        # Somebody honest has to be left for each block.
        kind = self.chance.choice(self.kinds)
        name = self.chance.choice(names)
        if kind in FATAL and not self._others_hold(name):
            return False
        self.left -= 1
        self.log.append(f"{kind} {name} at {type(message).__name__} {source}>{target}")
        server = self.swarm.servers[name]
        if kind in FATAL:
            self.stopped.add(name)
        if kind == "kill":
            self.swarm.kill(name)
        elif kind == "kill soon":
            self.swarm.kill_soon(name, self.chance.uniform(0.0, 0.05))
        elif kind == "hang":
            self.swarm.hub.hang(name)
        elif kind == "garbage":
            server.tamper = lambda message, payload: spoilt(self.chance, message, payload)
        elif kind == "garbage once":
            once = iter([True])
            server.tamper = lambda message, payload: (
                spoilt(self.chance, message, payload) if payload and next(once, False) else (message, payload)
            )
        elif kind == "forget":
            server.sessions.clear()
        elif kind == "reclaim":
            if sessions := list(server.sessions._sessions.values()):
                server.sessions.ask_to_leave(session := self.chance.choice(sessions))
                server.sessions.close(session, "asked_to_leave")
        elif kind == "break off":
            sessions = [session for session in server.sessions._sessions.values() if session.client is not None]
            if sessions:
                self.chance.choice(sessions).client.close()
        elif kind == "leave":
            asyncio.get_running_loop().create_task(self._leave(server))
        elif kind == "slow":
            server.runtime._seconds = self.chance.choice([0.5, 1.5])
        elif kind == "stuck":
            server.runtime._seconds = 1000.0
        return kind == "lose"

    def _others_hold(self, name: str) -> bool:
        rest = [s.info.span for n, s in self.swarm.servers.items() if n != name and n not in self.stopped]
        return all(any(block in span for span in rest) for block in range(BLOCKS))

    async def _leave(self, server: Server) -> None:
        with suppress(Exception):
            await server.handler.hand_over()


def spoilt(chance: random.Random, message: Any, payload: Any) -> tuple[Any, Any]:
    kind = chance.choice(["nan", "short", "long", "type", "bytes", "dtype"])
    if not payload:
        return message, payload
    if kind == "nan" or isinstance(message, messages.PushRequest):
        return message, b"\xff" * len(payload)
    if kind == "short":
        return message, bytes(payload)[:-1]
    if kind == "long":
        return message, bytes(payload) * 100
    if kind == "type":
        return messages.InfoReply(0, 1, 0, 0, "1"), b""
    if kind == "bytes":
        return msgspec.Raw(b"\xc1"), b""
    return msgspec.structs.replace(message, dtype="float64"), payload


async def next_step(talk: Conversation, chance: random.Random) -> None:
    """Some step that a session may make now."""
    if chance.random() < 0.25:
        return await talk.stream(chance, chance.randint(3, 12))
    lengths, caps = talk.lengths, talk.caps
    sources = None
    if lengths and chance.random() < 0.3:
        sources = tuple(chance.randrange(len(lengths)) for _ in range(chance.randint(1, 3)))
        rows = len(sources)
        limits = [caps[source] for source in sources]
    else:
        rows = chance.randint(1, 3) if not lengths or chance.random() < 0.2 else len(lengths)
        limits = [*caps, *[0] * rows][:rows]
    starts = tuple(limit if chance.random() < 0.8 else chance.randint(0, limit) for limit in limits)
    counts = tuple(chance.choice([1, 1, 1, 0, 2, 4]) for _ in range(rows))
    if not any(counts):
        counts = (1,) * rows
    layout = StepLayout(starts, counts, sources)
    if talk.chain.appends(layout) and chance.random() < 0.5:
        await talk.prefill(*chunks(chance, counts))
    else:
        await talk.step(layout)


def chunks(chance: random.Random, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A prompt, a few tokens at a time, as a padded batch would be cut."""
    left = [count + chance.choice([0, 2, 4]) for count in counts]
    found = []
    while any(left):
        found.append(tuple(min(more, chance.choice([0, 1, 2])) for more in left))
        left = [more - taken for more, taken in zip(left, found[-1], strict=True)]
    return [counts for counts in found if any(counts)]


def play(model: Any, seed: int) -> list[str]:
    chance = random.Random(seed)
    log: list[str] = []

    async def scenario() -> None:
        push, older = chance.random() < 0.8, chance.random() < 0.3
        swarm = Swarm(model, SERVERS, missing_blocks_timeout=2e4, push=push, older=older)
        if chance.random() < 0.5:
            swarm.hub.delay = lambda source, target: chance.uniform(0, 0.05)
        await swarm.start()
        mischief = Mischief(swarm, chance, chance.randint(1, 6), chance.choice([0.02, 0.1, 0.5]), chance.random() < 0.5)
        mischief.log = log
        interrupts = chance.random() < 0.3
        swarm.on_message = mischief
        talk = await swarm.chain()
        for _ in range(8):
            log.append("step")
            step = asyncio.ensure_future(next_step(talk, chance))
            if interrupts and chance.random() < 0.4:
                await asyncio.wait({step}, timeout=chance.uniform(0, 0.2))
                step.cancel()
                log.append("interrupt")
            with suppress(asyncio.CancelledError):
                await step
        await require_equal_records(swarm, talk)
        await talk.chain.close()
        log.append(str(swarm.planner.failures))

    return run_logged(scenario, seed, log)


async def require_equal_records(swarm: Swarm, talk: Conversation) -> None:
    """Whatever happened, each honest server that is left can sign what its client knows."""
    await talk.chain._advance(everywhere=True)
    for hop in talk.chain._hops.hops:
        server, number = swarm.servers[hop.peer_id], hop.record.last
        session = server.sessions._sessions.get((CLIENT, hop.session_id))
        if session is not None and server.tamper is HONEST and number is not None:
            assert session.record.totals(number) == hop.record.totals(number) is not None, hop.peer_id


def run_logged(scenario: Callable[[], Coroutine[Any, Any, None]], seed: int, log: list[str]) -> list[str]:
    """The log of a scenario that was run on a virtual clock; an error carries it too."""
    try:
        virtual_time.run(scenario, limit=1e5)
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "; ".join(log))
        raise
    return log


EACH_SEED = pytest.mark.parametrize(
    "seeds", slow_except([range(first, first + 25) for first in range(0, 100, 25)], range(0, 25)), ids=str
)


@EACH_SEED
def test_outputs_stay_right(span_model, seeds):
    for seed in seeds:
        play(span_model, seed)
