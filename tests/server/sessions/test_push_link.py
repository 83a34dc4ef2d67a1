"""Steps that come from the server before, and outputs that go to the one behind. Times are virtual."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.server.sessions.push_link import (
    MIN_BYTES_PER_S,
    PUSH_CONNECT_TIMEOUT_S,
    PUSH_TIMEOUT_S,
    PUSHED_REPLY_DELAY_S,
)
from swarm.server.sessions.session import LINK_TIMEOUT_S
from swarm.server.sessions.session_table import RECONNECT_TIMEOUT_S
from swarm.transport.stream import Stream
from tests import memory_hub
from tests.memory_hub import MemoryNetwork
from tests.server.conversations import (
    HIDDEN,
    OPEN,
    STEP,
    Client,
    Server,
    bytes_of,
    changed,
    in_virtual_time,
    on_virtual_time,
    random,
)

LONG = 100.0
CLIENT = "hostile"
NEXT_SESSION = b"the next session"
LINK = messages.SetNeighbors("before", None, None)
TO_NEXT = messages.SetNeighbors(None, "next", NEXT_SESSION)


def push(step: messages.StepRequest, client: str = CLIENT, session_id: bytes = OPEN.session_id) -> messages.PushRequest:
    return messages.PushRequest(client, session_id, step)


async def linked(server: Server, link: messages.SetNeighbors = LINK) -> Client:
    """A client with one step behind it, and its neighbors known to the server."""
    client = await (await server.client(CLIENT)).begin()
    await client.stream.send(link)
    await client.ask(messages.InfoRequest())  # whose answer shows that the link was read
    return client


def payload_of(client: Client, tokens: int = 1) -> Any:
    """The inputs of `client.next_step(tokens)`."""
    return encode_tensor(random(tokens, client.steps), WireFormat.NONE)


async def pushed_step(client: Client, before: Client, tokens: int = 1) -> messages.StepReply:
    """The next step, pushed by `before`; the answer that the client hears is checked."""
    await before.stream.send(push(client.next_step(tokens)), payload_of(client, tokens))
    return client.check(*await client.hear(), random(tokens, client.steps))


@in_virtual_time()
async def test_a_pushed_step_is_answered_to_the_client(server):
    client, before = await linked(server), await server.client("before")
    await pushed_step(client, before)
    await pushed_step(client, before, 2)
    await client.right_step()  # the client itself may go on, too
    await pushed_step(client, before)
    await before.hears_nothing(LONG)


@pytest.mark.parametrize(
    ("pusher", "link", "changes"),
    [
        pytest.param("somebody", LINK, {}, id="another peer"),
        pytest.param(CLIENT, LINK, {}, id="the client, as if it were a server"),
        pytest.param("before", LINK, {"client": "good"}, id="unknown client"),
        pytest.param("before", LINK, {"session_id": b"another session!"}, id="unknown session"),
        pytest.param("before", changed(LINK, previous_peer=None), {}, id="the client delivers itself"),
        pytest.param("before", changed(LINK, previous_peer="other"), {}, id="linked to another peer"),
        pytest.param("before", None, {}, id="not linked yet"),
        pytest.param("next", TO_NEXT, {}, id="the one behind"),
    ],
)
@in_virtual_time()
async def test_who_may_not_push_is_refused_and_changes_nothing(server, pusher, link, changes):
    client = await linked(server, link) if link else await (await server.client(CLIENT)).begin()
    stranger = await server.client(pusher)
    began = asyncio.get_running_loop().time()
    text = await stranger.refused("unknown_session", changed(push(client.next_step()), **changes), bytes_of(1))
    assert text == "there is no session here into which this peer may push"
    assert asyncio.get_running_loop().time() - began <= LINK_TIMEOUT_S
    await client.hears_nothing(LONG)
    await client.right_step()


@in_virtual_time()
async def test_after_a_change_of_neighbors_only_the_new_one_may_push(server):
    client, old, new = await linked(server), await server.client("before"), await server.client("new")
    await pushed_step(client, old)
    await client.stream.send(changed(LINK, previous_peer="new"))
    await pushed_step(client, new)
    await old.refused("unknown_session", push(client.next_step()), bytes_of(1))
    await pushed_step(client, new)


@pytest.mark.parametrize("link", [None, changed(LINK, previous_peer="old")], ids=["first link", "another link before"])
@in_virtual_time()
async def test_a_push_may_be_a_little_ahead_of_its_link(server, link):
    client = await linked(server, link) if link else await (await server.client(CLIENT)).begin()
    before = await server.client("before")
    await before.stream.send(push(client.next_step()), payload_of(client))
    await client.hears_nothing(LINK_TIMEOUT_S * 0.9)
    await client.stream.send(LINK)
    client.check(*await client.hear(), random(1, client.steps))


@in_virtual_time()
async def test_a_link_without_a_session(server):
    await (await server.client()).refused("unknown_session", TO_NEXT)
    client = await (await server.client(CLIENT)).begin()
    server.sessions.close(server.session())
    nobody = Next()
    await MemoryNetwork(server.hub, "next").serve(nobody)
    await client.refused("unknown_session", TO_NEXT)
    await asyncio.sleep(LONG)
    assert nobody.streams == 0  # nobody would ever have closed it


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["quick", "slow"])
@pytest.mark.parametrize("first", ["pushed", "delivered"])
def test_a_step_that_is_pushed_and_delivered_is_computed_once(model, first, seconds):
    """While the first one is still being computed, or after. Only what the client asks itself is answered again."""

    async def act(server):
        client, before = await linked(server), await server.client("before")
        jobs = server.runtime.jobs
        request, payload, hidden = client.next_step(), payload_of(client), random(1, client.steps)
        requests = [(before, push(request)), (client, request)]
        for sender, message in requests if first == "pushed" else requests[::-1]:
            await sender.stream.send(message, payload)
        answers = [await client.hear() for _ in range(2 if first == "pushed" else 1)]
        client.check(*answers[0], hidden)
        assert answers[-1] == answers[0]
        await client.hears_nothing(LONG)
        await before.hears_nothing(LONG)
        assert server.runtime.jobs == jobs + 1
        await client.right_step()

    on_virtual_time(model, act, seconds)


@pytest.mark.parametrize("age", [1, 2])
@in_virtual_time()
async def test_a_push_that_the_client_has_overtaken_is_ignored(server, age):
    """Whatever it holds, and without a word to anybody: all have the answer that it would bring."""
    client, before = await linked(server), await server.client("before")
    for _ in range(2):
        await client.right_step()
    jobs = server.runtime.jobs
    late = changed(client.next_step(), step=client.steps - age, starts=[0])
    await before.stream.send(push(late), bytes_of(1))
    await client.hears_nothing(LONG)
    await before.hears_nothing(LONG)
    assert server.runtime.jobs == jobs
    await client.right_step()
    await pushed_step(client, before)


@pytest.mark.parametrize(
    ("code", "changes", "payload"),
    [
        pytest.param("wrong_shape", {}, bytes_of(2), id="payload too long"),
        pytest.param("too_long", {"counts": [7]}, bytes_of(7), id="beyond max_length"),
        pytest.param("not_finite", {}, b"\xff" * (4 * HIDDEN), id="not finite"),
        pytest.param("cache_full", {"starts": [2] + [0] * 8, "counts": [1] * 9}, bytes_of(9), id="too many rows"),
    ],
)
@in_virtual_time()
async def test_what_is_wrong_with_a_pushed_step_is_told_to_the_client(server, code, changes, payload):
    """It has to act: perhaps the server before has spoiled what it passed on."""
    client, before = await linked(server, changed(LINK, sequences=9)), await server.client("before")
    await before.stream.send(push(changed(STEP, **changes)), payload)
    refusal, _ = await client.hear()
    assert isinstance(refusal, messages.Refusal)
    assert (refusal.code, refusal.step) == (code, STEP.step)
    await before.hears_nothing(LONG)
    await client.right_step()  # its own copy of the same step
    await pushed_step(client, before)


@in_virtual_time()
async def test_a_client_that_was_away_asks_for_what_was_pushed_meanwhile(server):
    client, before = await linked(server), await server.client("before")
    client.stream.close()
    await asyncio.sleep(0)
    request, payload = client.next_step(), payload_of(client)
    await before.stream.send(push(request), payload)
    await asyncio.sleep(1)
    jobs = server.runtime.jobs
    server.now += RECONNECT_TIMEOUT_S
    again = await server.client(CLIENT)
    assert await again.ask(OPEN) == (messages.SessionOpened(client.steps + 1), b"")
    reply, output = await again.ask(request, payload)
    assert server.runtime.jobs == jobs
    again.history, again.steps = client.history, client.steps
    again.check(reply, output, random(1, client.steps))
    await pushed_step(again, before)  # the neighbors are still known


class Next:
    """The server behind. It notes what is pushed to it.

    Args:
        refuses: it answers everything with a refusal.
        hangs_up: it ends its streams after so many messages.
    """

    def __init__(self, refuses: bool = False, hangs_up: int | None = None) -> None:
        self.pushed: list[tuple[messages.ClientMessage, bytes]] = []
        self.streams = 0
        self.open = 0
        self._refuses = refuses
        self._hangs_up = hangs_up

    async def __call__(self, stream: Stream) -> None:
        self.streams += 1
        self.open += 1
        assert stream.peer_id == "server"
        try:
            while len(self.pushed) != self._hangs_up:
                frame = await stream.receive()
                self.pushed.append((messages.decode_client(frame.header), bytes(frame.payload)))
                if self._refuses:
                    await stream.send(messages.Refusal("unknown_session", "no"))
        finally:
            self.open -= 1


async def with_next(server: Server, **options: Any) -> tuple[Client, Next]:
    behind = Next(**options)
    await MemoryNetwork(server.hub, "next").serve(behind)
    return await linked(server, TO_NEXT), behind


async def timed_step(client: Client, tokens: int = 1) -> tuple[bool, float]:
    """Whether the next step was pushed on, and the seconds until its answer, which is checked."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    reply = await client.right_step(tokens)
    return reply.pushed, loop.time() - began


@in_virtual_time()
async def test_outputs_are_pushed_on_just_as_the_client_gets_them(server):
    client, behind = await with_next(server)
    hidden = random(3, 5)
    request = messages.StepRequest(4, [2, 0], [1, 2], WireFormat.NONE, "float32", [0, 0], [0, 3], exit_block=9)
    reply, payload = await client.ask(request, encode_tensor(hidden, WireFormat.NONE))
    assert isinstance(reply, messages.StepReply)
    assert reply.pushed
    assert behind.pushed == [(push(request, CLIENT, NEXT_SESSION), payload)]
    await client.ask(request, encode_tensor(hidden, WireFormat.NONE))
    assert len(behind.pushed) == 1  # a reply that is sent again is not pushed again


@in_virtual_time()
async def test_a_reply_that_is_given_again_leaves_the_delivery_to_the_client(server):
    """Whether the push has arrived is not known then."""
    client, _ = await with_next(server)
    request, payload = client.next_step(), payload_of(client)
    first, _ = await client.ask(request, payload)
    again, _ = await client.ask(request, payload)
    assert (first.pushed, again.pushed) == (True, False)


@in_virtual_time()
async def test_a_pushed_step_is_pushed_on(server):
    behind = Next()
    await MemoryNetwork(server.hub, "next").serve(behind)
    client = await linked(server, messages.SetNeighbors("before", "next", NEXT_SESSION))
    before = await server.client("before")
    for _ in range(3):
        assert (await pushed_step(client, before)).pushed
    assert [message.step.step for message, _ in behind.pushed] == [1, 2, 3]
    assert behind.streams == 1


@in_virtual_time()
async def test_a_next_server_that_cannot_be_connected_to_costs_a_wait_once(server):
    server.hub.hang("next")
    client = await linked(server, TO_NEXT)
    assert await timed_step(client) == (False, pytest.approx(PUSH_CONNECT_TIMEOUT_S))
    for _ in range(3):
        assert await timed_step(client) == (False, 0.0)


def test_a_next_server_that_reads_nothing_costs_a_wait_once(model, monkeypatch):
    monkeypatch.setattr(memory_hub, "MAX_UNREAD_BYTES", 100)

    async def act(server):
        client, _ = await with_next(server)
        assert (await timed_step(client))[0]
        server.hub.hang("next")
        pushed, seconds = await timed_step(client)
        assert not pushed
        assert PUSH_TIMEOUT_S <= seconds <= PUSH_TIMEOUT_S + 4 * HIDDEN / MIN_BYTES_PER_S + 1e-6
        for _ in range(3):
            assert await timed_step(client) == (False, 0.0)

    on_virtual_time(model, act)


@pytest.mark.parametrize("options", [{"hangs_up": 2}, {"refuses": True}], ids=str)
@in_virtual_time()
async def test_a_next_server_that_wants_no_more(server, options):
    client, behind = await with_next(server, **options)
    results = [await timed_step(client) for _ in range(4)]
    assert results[0] == (True, pytest.approx(PUSHED_REPLY_DELAY_S))
    assert results[-1] == (False, 0.0)
    assert len(behind.pushed) <= 2
    await asyncio.sleep(1)
    assert behind.open == 0


@in_virtual_time()
async def test_another_next_server(server):
    client, old = await with_next(server)
    new = Next()
    await MemoryNetwork(server.hub, "new").serve(new)
    assert (await timed_step(client))[0]
    await client.stream.send(changed(TO_NEXT, next_peer="new"))
    assert (await timed_step(client))[0]
    assert (len(old.pushed), len(new.pushed)) == (1, 1)
    assert (old.open, new.open) == (0, 1)
    await client.stream.send(changed(TO_NEXT, next_peer=None))
    assert not (await timed_step(client))[0]
    assert new.open == 0


@in_virtual_time()
async def test_a_change_of_neighbors_while_a_push_waits_for_its_connection(server):
    server.hub.hang("next")
    client = await linked(server, TO_NEXT)
    again = await server.client(CLIENT)
    await again.ask(OPEN)
    step = asyncio.create_task(timed_step(client))
    await asyncio.sleep(PUSH_CONNECT_TIMEOUT_S / 2)
    await again.stream.send(changed(TO_NEXT, next_peer=None))
    assert await step == (False, pytest.approx(PUSH_CONNECT_TIMEOUT_S / 2))


@pytest.mark.parametrize("end", ["close", "expire", "hang up"])
@in_virtual_time()
async def test_the_way_to_the_next_server_ends_with_the_session(server, end):
    client, behind = await with_next(server)
    assert (await timed_step(client))[0]
    if end == "close":
        await client.stream.send(messages.CloseSession())
    elif end == "hang up":
        server.handler.hang_up()
    else:
        client.stream.close()
        await asyncio.sleep(1)
        assert behind.open == 1  # the client may come back
        server.now += RECONNECT_TIMEOUT_S + 1
        server.sessions.expire()
    await asyncio.sleep(1)
    assert behind.open == 0
