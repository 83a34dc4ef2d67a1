"""Servers that frame their neighbors, spend what is not theirs, or send others on errands.

Each test is an attack that succeeds on commit a254ca2; its docstring says what it did there. A bystander uses the same
servers meanwhile: its outputs stay right, and nobody who did nothing is kept out of its routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from swarm.data_structures import Span
from swarm.errors import AdapterRefused, RemoteError, TooLong
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.protocol import messages
from tests import virtual_time, zoo
from tests.client.chains import BLOCKS, Conversation, Swarm
from tests.memory_hub import MemoryNetwork
from tests.server.conversations import OPEN, STEP, Client, Server, bytes_of, changed, make_model, on_virtual_time

THREE = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
LINK = messages.SetNeighbors("before", None, None)


def load(family: str, folder: Path) -> SpanModel:
    """All blocks of a tiny model."""
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, folder))
    return load_span(checkpoint, Span(0, BLOCKS), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    return load("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    """What the one server has that is talked to by hand."""
    return make_model(tmp_path_factory.mktemp("part"))


def with_bystander(
    model: SpanModel,
    servers: dict[str, tuple[int, int]],
    attack: Callable[[Swarm, Conversation, frozenset[bytes]], Awaitable[None]],
) -> None:
    """Let `attack(swarm, victim, ids)` happen to a session, whose ids at the servers are given, beside another one."""

    async def scenario() -> None:
        swarm = Swarm(model, servers)
        await swarm.start()
        bystander = await swarm.chain()
        await bystander.append(2)
        others = {session for server in swarm.servers.values() for session in server.sessions._sessions}
        victim = await swarm.chain()
        await victim.append(3)
        ids = frozenset(
            session_id
            for server in swarm.servers.values()
            for peer, session_id in server.sessions._sessions
            if (peer, session_id) not in others
        )
        await attack(swarm, victim, ids)
        for _ in range(3):
            await bystander.append(1)
            await victim.append(1)
        await bystander.chain.close()
        await victim.chain.close()

    virtual_time.run(scenario)


def pushing(lie: Callable[[Any, Any], Any], ids: frozenset[bytes]) -> Any:
    """Pushes into these sessions are changed; all else is honest, also the copy for the client."""

    def tamper(message: Any, payload: Any) -> Any:
        if not isinstance(message, messages.PushRequest) or message.session_id not in ids:
            return message, payload
        step, payload = lie(message.step, payload)
        return msgspec.structs.replace(message, step=step), payload

    return tamper


def other_values(step: Any, payload: Any) -> Any:
    return step, (np.frombuffer(payload, np.float32) * 1.01).tobytes()


def huge_values(step: Any, payload: Any) -> Any:
    return step, (np.sign(np.frombuffer(payload, np.float32)) * np.float32(3e38)).tobytes()


def far_step(step: Any, payload: Any) -> Any:
    return changed(step, step=step.step + 9, epoch=step.step + 9), payload


def more_tokens(step: Any, payload: Any) -> Any:
    return changed(step, counts=[7]), bytes(payload) * 7


def rewritten_past(step: Any, payload: Any) -> Any:
    return changed(step, starts=[0], epoch=step.step), payload


LIES = {
    "other values": other_values,
    "a step that never was": far_step,
    "more tokens": more_tokens,
    "over the past": rewritten_past,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liar", ["a", "b"])
def test_shows_one_thing_and_pushes_another(whole, lie, liar):
    """On a254ca2 other values gave wrong outputs, and nobody was suspected (so did a push over the past); for a step
    that never was, and for more tokens, the next server was banned as one that answers wrongly."""

    async def attack(swarm: Swarm, victim: Conversation, ids: frozenset[bytes]) -> None:
        swarm.servers[liar].tamper = pushing(LIES[lie], ids)
        for _ in range(3):
            await victim.append(1)
        await victim.prefill((2,), (3,), (1,))
        assert swarm.planner.failures == []
        behind = {"a": "b", "b": "c"}[liar]
        assert set(swarm.planner.distrusted) == {(liar, behind)}

    with_bystander(whole, THREE, attack)


@pytest.mark.parametrize("liar", ["a", "b"])
def test_huge_values_of_which_another_server_makes_nan(liar, tmp_path):
    """On a254ca2 the server that got them answered NaN, and was banned as one that answers wrongly."""

    async def attack(swarm: Swarm, victim: Conversation, ids: frozenset[bytes]) -> None:
        swarm.servers[liar].tamper = pushing(huge_values, ids)
        for _ in range(3):
            await victim.append(1)
        assert swarm.planner.failures == []

    with_bystander(load("gpt2", tmp_path), THREE, attack)


@pytest.mark.parametrize("error", [TooLong, AdapterRefused])
def test_too_long_says_one_server(whole, error):
    """On a254ca2 the first server that said so ended the call with its error, though another one would have gone on."""

    async def attack(swarm: Swarm, victim: Conversation, ids: frozenset[bytes]) -> None:
        refusal = messages.Refusal(error.code, "no", victim.chain.next_number)
        server = swarm.servers["b"]

        def tamper(message: Any, payload: Any) -> Any:
            is_victims = isinstance(message, messages.StepReply) and message.step == refusal.step
            return (refusal, b"") if is_victims else (message, payload)

        server.tamper = tamper
        await victim.append(1)
        await victim.append(1)
        assert [(peer, type(why)) for peer, why in swarm.planner.failures] == [("b", error)]

    async def attack_and_restore(swarm: Swarm, victim: Conversation, ids: frozenset[bytes]) -> None:
        await attack(swarm, victim, ids)
        swarm.servers["b"].tamper = lambda message, payload: (message, payload)

    with_bystander(whole, {**THREE, "b2": (2, 4)}, attack_and_restore)


def by_hand(model: SpanModel, attack: Callable[[Server, Client, Client], Awaitable[None]], **options: Any) -> None:
    """Let `attack(server, victim, before)` happen to the session of a client whose next server before may push.

    Afterwards it goes on as if nothing had been, and can be opened again; and so does that of a bystander.
    """

    async def act(server: Server) -> None:
        bystander = await (await server.client("bystander")).begin(changed(OPEN, session_id=b"somebody else's."))
        victim = await (await server.client("victim")).begin()
        await victim.stream.send(LINK)
        await victim.ask(messages.InfoRequest())
        free = server.sessions.free
        await attack(server, victim, await server.client("before"))
        await bystander.right_step()
        assert server.sessions.free == free
        await victim.right_step()
        again = await server.client("victim")
        assert (await again.ask(OPEN))[0] == messages.SessionOpened(victim.steps)

    on_virtual_time(model, act, **options)


@pytest.mark.parametrize("ahead", [2**31 - 3, 10_000])
def test_a_push_far_ahead(part, ahead):
    """On a254ca2 it was computed and answered to the client. Its own next step was refused then, and after one with the
    highest number the session could not be opened again."""

    async def attack(server: Server, victim: Client, before: Client) -> None:
        step = changed(STEP, step=1 + ahead, epoch=1 + ahead)
        reply, _ = await before.ask(messages.PushRequest("victim", OPEN.session_id, step), bytes_of(1))
        assert isinstance(reply, messages.Refusal)
        assert reply.code == "wrong_position"
        await victim.hears_nothing(100.0)

    by_hand(part, attack)


@pytest.mark.parametrize("rows", [2, 6])
def test_a_push_of_more_rows(part, rows):
    """On a254ca2 each took eight more tokens of the client's cache, and more than there were ended the session."""

    async def attack(server: Server, victim: Client, before: Client) -> None:
        step = changed(STEP, starts=[2] + [0] * (rows - 1), counts=[1] * rows)
        reply, _ = await before.ask(messages.PushRequest("victim", OPEN.session_id, step), bytes_of(rows))
        assert isinstance(reply, messages.Refusal)
        await victim.hears_nothing(100.0)

    by_hand(part, attack)


def test_asking_which_sessions_there_are(part):
    """On a254ca2 a session that was not there was refused at once, one that was after two seconds."""

    async def attack(server: Server, victim: Client, before: Client) -> None:
        stranger, clock = await server.client("stranger"), asyncio.get_running_loop()
        seen = []
        for client, session_id in [("victim", OPEN.session_id), ("victim", bytes(16)), ("nobody", OPEN.session_id)]:
            began = clock.time()
            reply, _ = await stranger.ask(messages.PushRequest(client, session_id, STEP), bytes_of(1))
            seen.append((reply, round(clock.time() - began, 3)))
        assert seen[0] == seen[1] == seen[2]

    by_hand(part, attack)


def test_a_client_that_sends_a_server_all_over_the_network(part):
    """On a254ca2 the server dialed all of a thousand peers that a client named, at once."""

    async def attack(server: Server, victim: Client, before: Client) -> None:
        dialed: list[str] = []
        open_stream = server.network.open_stream

        async def watched(peer_id: str) -> Any:
            dialed.append(peer_id)
            return await open_stream(peer_id)

        server.network.open_stream = watched  # type: ignore[method-assign]
        sender = await (await server.client("sender")).begin(changed(OPEN, session_id=b"the one that asks"[:16]))
        for number in range(1000):
            await sender.stream.send(messages.SetNeighbors(None, f"peer {number}", bytes(16)))
        await sender.ask(messages.InfoRequest())
        assert 0 < len(dialed) <= 64
        # Others are not held up by that: this one's link is made at once.
        pushed = asyncio.Event()

        async def behind(stream: Any) -> None:
            await stream.receive()
            pushed.set()

        await MemoryNetwork(server.hub, "behind").serve(behind)
        await victim.stream.send(messages.SetNeighbors("before", "behind", bytes(16)))
        reply = await victim.right_step()
        assert reply.pushed
        await pushed.wait()
        await sender.stream.send(messages.CloseSession())
        await victim.stream.send(LINK)
        await victim.ask(messages.InfoRequest())
        await asyncio.sleep(100.0)

    by_hand(part, attack)


def test_a_step_that_is_too_long_for_all_is_the_clients_own_matter(whole):
    """Two servers that agree are both right. (On a254ca2 one was enough.)"""

    async def attack(swarm: Swarm, victim: Conversation, ids: frozenset[bytes]) -> None:
        with pytest.raises(RemoteError) as refused:
            await victim.append(100)
        assert isinstance(refused.value, TooLong)
        assert swarm.planner.failures == []

    with_bystander(whole, {**THREE, **{f"{name}2": span for name, span in THREE.items()}}, attack)
