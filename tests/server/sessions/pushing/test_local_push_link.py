"""A span that a client has cut into parts: outputs go on from session to session inside one server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.data_structures import Span, WireFormat
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.server.compute import engine as engine_module
from swarm.server.sessions.pushing import local_push_link
from swarm.server.sessions.pushing.local_push_link import ROOM_TIMEOUT_S
from tests.server.conversations import (
    CPU,
    HIDDEN,
    OPEN,
    PATIENCE,
    Client,
    Server,
    alone,
    assert_close,
    changed,
    make_model,
    on_virtual_time,
    random,
    scenario,
)

SERVER = "server"
PARTS = (Span(1, 2), Span(2, 4))
LONG = 100.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SpanModel:
    return make_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Span, int]]:
    """The blocks and tokens of each iteration of the engine."""
    found: list[tuple[Span, int]] = []
    advance = engine_module.advance_steps

    def counted(parts: list[tuple[Any, int]]) -> None:
        found.append((parts[0][0].model.span, sum(tokens for _, tokens in parts)))
        advance(parts)

    monkeypatch.setattr(engine_module, "advance_steps", counted)
    return found


def session_id(part: Span, name: str = "part") -> bytes:
    return f"{name} {part.start} {part.end}".encode().ljust(16)


class CutClient:
    """A client whose route goes through several parts of one server's span, each on a stream of its own."""

    def __init__(self, parts: Sequence[Span], streams: Sequence[Client]) -> None:
        self.parts = parts
        self.streams = streams

    @classmethod
    async def begin(cls, server: Server, parts: Sequence[Span] = PARTS, name: str = "hostile") -> CutClient:
        streams = [await server.client(name) for _ in parts]
        for part, stream in zip(parts, streams, strict=True):
            reply, _ = await stream.ask(
                changed(OPEN, session_id=session_id(part), start=part.start, end=part.end, max_length=16)
            )
            assert reply == messages.SessionOpened(0)
        client = cls(parts, streams)
        for number in range(len(parts)):
            await client.link(number)
        return client

    async def link(self, number: int) -> None:
        previous = SERVER if number else None
        following = self.parts[number + 1 : number + 2]
        names = (SERVER, session_id(following[0])) if following else (None, None)
        await self.streams[number].stream.send(messages.SetNeighbors(previous, *names))
        await self.streams[number].ask(messages.InfoRequest())  # whose answer shows that the link was read

    async def send(self, step: messages.StepRequest, hidden: torch.Tensor) -> None:
        await self.streams[0].stream.send(step, encode_tensor(hidden, WireFormat.NONE))

    async def answers(self, tokens: int = 1) -> list[tuple[messages.StepReply, torch.Tensor]]:
        """Each part's answer to the same step."""
        return [await answer(stream, tokens) for stream in self.streams]

    async def step(self, step: messages.StepRequest, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Each part's outputs of one step, of which all but the last have been handed on."""
        await self.send(step, hidden)
        answers = await self.answers(len(hidden))
        assert [reply.pushed for reply, _ in answers] == [True] * (len(self.parts) - 1) + [False]
        assert {reply.step for reply, _ in answers} == {step.step}
        return [output for _, output in answers]


async def answer(client: Client, tokens: int = 1) -> tuple[messages.StepReply, torch.Tensor]:
    reply, payload = await client.hear()
    assert isinstance(reply, messages.StepReply), reply
    return reply, decode_tensor(payload, tokens, HIDDEN, WireFormat.NONE, "float32", CPU)


def step(number: int, start: int, count: int = 1, epoch: int = 0, **changes: Any) -> messages.StepRequest:
    return messages.StepRequest(number, [start], [count], WireFormat.NONE, "float32", epoch=epoch, **changes)


def parts_of(server: Server) -> list[Any]:
    """The sessions of a cut client, in the order of their blocks."""
    found = [one for one in server.sessions._sessions.values() if one.terms.peer_id == "hostile"]
    return sorted(found, key=lambda one: one.terms.span.start)


@pytest.mark.parametrize("parts", [PARTS, (Span(1, 2), Span(2, 3), Span(3, 4))], ids=["two", "three"])
def test_the_parts_of_a_span_compute_just_what_the_span_does(model, parts):
    async def act(server):
        cut = await CutClient.begin(server, parts)
        whole = await server.client("whole")
        await whole.ask(changed(OPEN, max_length=16))
        for number, (start, count, epoch) in enumerate([(0, 5, 0), (5, 1, 0), (6, 1, 0), (4, 2, 3), (6, 1, 3)]):
            request, hidden = step(number, start, count, epoch), random(count, number)
            *_, output = await cut.step(request, hidden)
            _, payload = await whole.ask(request, encode_tensor(hidden, WireFormat.NONE))
            assert torch.equal(output, decode_tensor(payload, count, HIDDEN, WireFormat.NONE, "float32", CPU))
        assert server.sessions.free == 64 - 8 - 16 - sum(-(-16 * part.length // 3) for part in parts)

    scenario(model, act)


def test_copies_of_outputs_that_are_handed_on_here_are_not_delayed(model):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.send(step(0, 0, 3), random(3))
        for stream in cut.streams:
            await answer(stream, 3)
        assert asyncio.get_running_loop().time() == 0

    on_virtual_time(model, act)


@pytest.mark.parametrize("previous", [None, "before", "hostile"])
def test_a_session_takes_from_the_server_itself_only_what_its_client_said(model, previous):
    async def act(server):
        cut = await CutClient.begin(server)
        later = cut.streams[1]
        await later.stream.send(messages.SetNeighbors(previous, None, None))
        await later.ask(messages.InfoRequest())
        await cut.send(step(0, 0, 2), random(2))
        reply, output = await answer(cut.streams[0], 2)
        assert reply.pushed  # it was taken, and lost on the way
        await later.hears_nothing(LONG)
        await cut.send(step(1, 2), random(1, 1))
        assert not (await answer(cut.streams[0]))[0].pushed
        reply, _ = await later.ask(step(0, 0, 2), encode_tensor(output, WireFormat.NONE))
        assert isinstance(reply, messages.StepReply)

    on_virtual_time(model, act)


def test_no_client_reaches_the_session_of_another_one_through_the_server(model):
    """Even if it knows the id of a session whose client lets the server push, or has one with the same id."""

    async def act(server):
        cut = await CutClient.begin(server)
        thief = await server.client("thief")
        await thief.ask(changed(OPEN, session_id=b"session of thief", end=2))
        await thief.stream.send(messages.SetNeighbors(None, SERVER, session_id(PARTS[1])))
        await thief.stream.send(step(0, 0, 2), encode_tensor(random(2), WireFormat.NONE))
        await answer(thief, 2)
        await cut.streams[1].hears_nothing(LONG)
        assert parts_of(server)[1].next_step == 0
        await cut.step(step(0, 0, 2), random(2))

    on_virtual_time(model, act)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sessions_in_a_circle_compute_each_step_once(model, length):
    async def act(server):
        streams = [await server.client() for _ in range(length)]
        for number, stream in enumerate(streams):
            await stream.ask(changed(OPEN, session_id=bytes([number]) * 16))
            await stream.stream.send(messages.SetNeighbors(SERVER, SERVER, bytes([(number + 1) % length]) * 16))
            await stream.ask(messages.InfoRequest())
        jobs = server.runtime.jobs
        for number, (start, count) in enumerate([(0, 2), (2, 1), (3, 1)]):
            await streams[0].stream.send(step(number, start, count), encode_tensor(random(count), WireFormat.NONE))
            for stream in streams:
                assert (await answer(stream, count))[0].pushed
            await server.handler.idle()
            assert server.runtime.jobs == jobs + (number + 1) * length
        for stream in streams:
            await stream.hears_nothing(LONG)
        assert server.sessions.free == 64 - 8 * length

    on_virtual_time(model, act)


def bound_to(steps: int, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Links have room for so many steps of one token."""
    if bound == "steps":
        monkeypatch.setattr(local_push_link, "MAX_WAITING_STEPS", steps)
    else:
        monkeypatch.setattr(local_push_link, "MAX_WAITING_BYTES", steps * 4 * HIDDEN)


@pytest.mark.parametrize("bound", ["steps", "bytes"])
def test_what_a_link_has_no_room_for_waits_and_all_steps_arrive_in_order(model, monkeypatch, bound):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        bound_to(2, monkeypatch, bound)
        first, later = parts_of(server)
        async with later.lock:  # as if it were busy
            for number in range(1, 7):
                await cut.send(step(number, number + 1), random(1, number))
            for _ in range(3):  # the first one waits for the lock
                assert (await answer(cut.streams[0]))[0].pushed
            await cut.streams[0].hears_nothing(1)
            assert first.next_step == 5  # the step without room is computed, and no further one
        for number in range(1, 7):
            assert (await answer(cut.streams[1]))[0].step == number
        for number in (4, 5, 6):
            reply, _ = await answer(cut.streams[0])
            assert (reply.step, reply.pushed) == (number, True)
        await cut.step(step(7, 8), random(1, 7))
        assert first.next_step == later.next_step == 8

    on_virtual_time(model, act)


def test_links_of_one_client_share_the_room_for_bytes(model, monkeypatch):
    async def act(server):
        parts = (Span(1, 2), Span(2, 3), Span(3, 4))
        cut = await CutClient.begin(server, parts)
        await cut.step(step(0, 0, 2), random(2))
        monkeypatch.setattr(local_push_link, "MAX_WAITING_BYTES", 3 * 4 * HIDDEN)
        first, middle, later = parts_of(server)
        async with later.lock:
            for number in range(1, 11):
                await cut.send(step(number, number + 1), random(1, number))
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            waiting = [len(one.push_link._waiting) for one in (first, middle)]
            assert waiting == [1, 3]  # one step is taken in any case
            assert server.handler._pushed._waiting_bytes == {"hostile": 4 * 4 * HIDDEN}
        for stream in cut.streams:
            for number in range(1, 11):
                assert (await answer(stream))[0].step == number
        assert not server.handler._pushed._waiting_bytes

    on_virtual_time(model, act)


def test_later_parts_compute_on_while_their_answers_are_not_read(model):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        later = parts_of(server)[1]
        async with later.client._sending:  # a frame on its way to a client that does not read
            for number in (1, 2, 3):
                await cut.send(step(number, number + 1), random(1, number))
                assert (await answer(cut.streams[0]))[0].pushed
            idle = asyncio.create_task(server.handler.idle())
            await asyncio.sleep(0.1)
            assert later.next_step == 4
            assert not idle.done(), "what is not sent is not answered"
        for number in (1, 2, 3):
            assert (await answer(cut.streams[1]))[0].step == number
        await idle

    on_virtual_time(model, act)


def test_a_fault_of_a_link_is_logged(model, monkeypatch, caplog):
    async def act(server):
        async def fail(*arguments):
            raise RuntimeError("a bug")

        cut = await CutClient.begin(server)
        monkeypatch.setattr(server.handler._pushed, "_compute", fail)
        await cut.send(step(0, 0, 2), random(2))
        assert (await answer(cut.streams[0], 2))[0].pushed
        await server.handler.idle()
        await asyncio.sleep(1)
        assert "handing steps of …ostile on inside this server failed" in caplog.text
        assert "a bug" in caplog.text

    on_virtual_time(model, act)


@pytest.mark.parametrize("end", ["of the time", "of the link"])
def test_a_step_does_not_wait_for_room_for_ever(model, monkeypatch, end):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        bound_to(1, monkeypatch, "steps")
        first, later = parts_of(server)
        async with later.lock:
            for number in (1, 2, 3):
                await cut.send(step(number, number + 1), random(1, number))
            assert [(await answer(cut.streams[0]))[0].pushed for _ in range(2)] == [True, True]
            began = asyncio.get_running_loop().time()
            if end == "of the link":
                first.close_push_link()
            assert not (await answer(cut.streams[0]))[0].pushed
            waited = asyncio.get_running_loop().time() - began
            assert waited == pytest.approx(ROOM_TIMEOUT_S if end == "of the time" else 0)
        assert (await answer(cut.streams[1]))[0].step == 1  # which had begun
        await cut.link(0)
        await server.handler.idle()

    on_virtual_time(model, act)


@pytest.mark.parametrize("end", ["the later part", "the first part", "another link", "no link", "hang up"])
def test_steps_on_their_way_to_a_session_that_ends_are_dropped(model, end):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        first, later = parts_of(server)
        await later.lock.acquire()
        for number in (1, 2, 3):
            await cut.send(step(number, number + 1), random(1, number))
            assert (await answer(cut.streams[0]))[0].pushed
        idle = asyncio.create_task(server.handler.idle())
        await asyncio.sleep(1)
        assert not idle.done()
        match end:
            case "the later part":
                await cut.streams[1].stream.send(messages.CloseSession())
            case "the first part":
                await cut.streams[0].stream.send(messages.CloseSession())
            case "another link" | "no link":
                where = (SERVER, b"another session ") if end == "another link" else (None, None)
                await cut.streams[0].stream.send(messages.SetNeighbors(None, *where))
            case "hang up":
                server.handler.hang_up()
        await asyncio.sleep(1)
        later.lock.release()
        await idle
        await asyncio.sleep(1)
        assert first.push_link is None or (end == "another link") == (not first.push_link._closed)
        if end in ("the first part", "another link", "no link"):
            assert (await answer(cut.streams[1]))[0].step == 1  # which had begun
            assert later.next_step == 2
            await cut.streams[1].hears_nothing(LONG)
        else:
            assert later.next_step == 1

    on_virtual_time(model, act)


def test_a_link_that_is_set_again_keeps_the_steps_that_wait(model):
    """A client sets it again if the hop before is replaced; what waits it counts as pushed."""

    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        later = parts_of(server)[1]
        async with later.lock:
            for number in (1, 2, 3):
                await cut.send(step(number, number + 1), random(1, number))
                assert (await answer(cut.streams[0]))[0].pushed
            await cut.link(0)
        for number in (1, 2, 3):
            assert (await answer(cut.streams[1]))[0].step == number
        await cut.step(step(4, 5), random(1, 4))

    on_virtual_time(model, act)


def test_a_link_that_was_closed_is_made_anew_when_it_is_set_again(model):
    async def act(server):
        cut = await CutClient.begin(server)
        first, _ = parts_of(server)
        first.push_link.close()
        await cut.link(0)
        await cut.step(step(0, 0, 2), random(2))

    on_virtual_time(model, act)


def test_a_link_to_a_session_that_comes_later_waits_for_it_a_little(model):
    async def act(server):
        cut = await CutClient.begin(server)
        later = parts_of(server)[1]
        later.allow_push_from(None)
        await cut.send(step(0, 0, 2), random(2))
        assert (await answer(cut.streams[0], 2))[0].pushed
        await asyncio.sleep(1)
        await cut.link(1)
        assert (await answer(cut.streams[1], 2))[0].step == 0

    on_virtual_time(model, act)


def test_steps_that_waited_for_the_one_before_are_computed_as_one(model, computed):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        later, history = parts_of(server)[1], [random(2)]
        await later.lock.acquire()
        for number in range(1, 6):
            history.append(random(1, number))
            await cut.send(step(number, number + 1), history[-1])
            assert (await answer(cut.streams[0]))[0].pushed
        computed.clear()
        later.lock.release()
        expected = model.forward(torch.cat(history).unsqueeze(0))[0]
        for number in range(1, 6):
            reply, output = await answer(cut.streams[1])
            assert reply.step == number
            assert_close(output, expected[number + 1 : number + 2])
        assert computed == [(PARTS[1], 1), (PARTS[1], 4)]
        history.append(random(1, 6))
        *_, output = await cut.step(step(6, 7), history[-1])
        assert_close(output, model.forward(torch.cat(history).unsqueeze(0))[0, -1:])

    scenario(model, act)


def test_copies_of_steps_that_were_computed_as_one_are_delayed_once(model):
    class LinkToAnotherServer:
        reply_delay_s = 1.0

        def close(self) -> None: ...

        async def push(self, request: messages.StepRequest, payload: Any) -> bool:
            return True

    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        later = parts_of(server)[1]
        later.push_link = LinkToAnotherServer()
        async with later.lock:
            for number in range(1, 6):
                await cut.send(step(number, number + 1), random(1, number))
                assert (await answer(cut.streams[0]))[0].pushed
            began = asyncio.get_running_loop().time()
        for number in range(1, 6):
            assert (await answer(cut.streams[1]))[0].step == number
        assert asyncio.get_running_loop().time() - began == pytest.approx(2)  # the first step, and the other four

    on_virtual_time(model, act)


def test_what_is_given_up_in_a_part_is_dropped_there_and_the_rest_goes_on(model):
    async def act(server):
        cut = await CutClient.begin(server)
        await cut.step(step(0, 0, 2), random(2))
        go_on = threading.Event()
        later = parts_of(server)[1]
        await later.lock.acquire()
        for number in range(1, 6):
            await cut.send(step(number, number + 1), random(1, number))
            await answer(cut.streams[0])
        assert server.runtime.post(lambda: go_on.wait(PATIENCE) or None)
        later.lock.release()
        await server.until(lambda: later.computing is not None and later.computing[0] == range(1, 2))
        for stream in cut.streams:
            await stream.stream.send(messages.GiveUp(4, 6))
        await server.until(lambda: 5 in later.given_up)
        go_on.set()
        for number in (1, 2, 3):
            assert (await answer(cut.streams[1]))[0].step == number
        *_, output = await cut.step(step(6, 5, epoch=6), random(1, 9))
        expected = torch.cat([random(2), *(random(1, number) for number in (1, 2, 3, 9))])
        assert_close(output, model.forward(expected.unsqueeze(0))[0, -1:])

    alone(model, act)
