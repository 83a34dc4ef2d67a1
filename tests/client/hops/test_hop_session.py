"""One server's part of a session, against servers that follow a script."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarm.client.config import RequestOptions
from swarm.client.hops.hop_progress import MAX_RETRIES
from swarm.client.hops.hop_session import OPEN_TIMEOUT_S, HopSession
from swarm.client.hops.input_history import Step
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import OutputShape
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import (
    CacheFull,
    NotFinite,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    ServerClosing,
    ServerFault,
    UnknownSession,
    WrongPosition,
)
from swarm.protocol import messages
from swarm.protocol.input_checksum import input_checksum
from tests.client.fakes import (
    BAD_REPLIES,
    HIDDEN,
    INPUT,
    LAYOUT,
    MANNER,
    OPENED,
    OUTPUT,
    Answer,
    FakeServer,
    FakeSwarm,
    bad_payloads,
    context,
    hop,
    refusal,
    replay_reply,
    reply,
    run,
)

INF = float("inf")
NOT_FINITE = "not finite"
OUTPUTS = PackedHidden(OUTPUT, 3, HIDDEN, WireFormat.FLOAT16, "float32")


class Session(HopSession):
    """A hop whose outputs are kept."""

    def __init__(
        self, swarm: FakeSwarm, manner: RequestOptions = MANNER, name: str = "server", early_exits: bool = False
    ) -> None:
        self.outputs: list[tuple[int, PackedHidden]] = []
        self.changes = 0

        def heard(_: HopSession, number: int, outputs: PackedHidden) -> None:
            self.outputs.append((number, outputs))

        def changed() -> None:
            self.changes += 1

        super().__init__(replace(context(swarm, manner), early_exits=early_exits), hop(name), heard, changed)

    async def ask(self, number: int, layout: StepLayout = LAYOUT, hidden: PackedHidden = INPUT) -> None:
        """Hand over a step and wait for what comes of it."""
        self.expect(number, OutputShape(hidden.tokens, hidden.hidden_size))
        await self.deliver(Step(number, layout, hidden, exit_block=number or None))
        await asyncio.sleep(0.1)


def with_session(act: Callable[[FakeServer, Session], Awaitable[None]], *answers: Answer) -> None:
    """Run `act(server, session)` with a session that is open at a server, which then gives these answers."""

    async def scenario(swarm: FakeSwarm) -> None:
        server = await swarm.add(OPENED, *answers)
        one = Session(swarm)
        await one.open()
        await act(server, one)

    run(scenario)


def test_it_says_what_it_wants_and_hands_on_what_it_gets():
    async def scenario(swarm):
        server = await swarm.add(OPENED, reply(0), reply(1, b"p" * 24, pushed=True))
        one = Session(swarm)
        assert await one.open() == 0
        await one.ask(0)
        assert (one.progress.replied, one.progress.delivered, one.progress.deadline, one.progress.error) == (
            0,
            0,
            INF,
            None,
        )
        second = StepLayout((2, 1), (1, 2), (1, 0), (5, 0))
        one.progress.on_call_begun(1)
        await one.ask(1, second)
        assert one.outputs == [(0, OUTPUTS), (1, PackedHidden(b"p" * 24, 3, HIDDEN, WireFormat.FLOAT16, "float32"))]
        assert one.changes == 0
        assert one.progress.clock.timing is not None
        assert one.progress.clock.timing.compute == 0.001
        await one.close()
        await asyncio.sleep(0.1)
        assert server.open_streams == 0
        (opened, _), first_step, second_step, (closed, _) = server.requests
        assert (opened.revision, opened.start, opened.end, opened.max_length) == ("main", 0, 3, 100)
        assert (opened.session_id, opened.reply_format) == (one.session_id, WireFormat.FLOAT16)
        assert first_step == (messages.StepRequest(0, [0, 0], [2, 1], WireFormat.NONE, "float32"), INPUT.payload)
        expected = messages.StepRequest(1, [2, 1], [1, 2], WireFormat.NONE, "float32", [1, 0], [5, 0], exit_block=1)
        assert second_step[0] == expected
        assert closed == messages.CloseSession()

    run(scenario)


def test_every_session_has_an_id_of_its_own_and_keeps_it():
    async def scenario(swarm):
        server = await swarm.add(OPENED)
        sessions = [Session(swarm) for _ in range(5)]
        for one in sessions * 2:
            await one.open()
        ids = [message.session_id for message, _ in server.requests]
        assert ids[:5] == ids[5:]
        assert len(set(ids)) == 5
        await asyncio.sleep(0.1)
        assert server.open_streams == 5  # the older connections are closed

    run(scenario)


def test_it_tells_who_its_neighbors_are():
    async def scenario(swarm):
        server = await swarm.add(OPENED)
        one, before, after = Session(swarm), Session(swarm, name="before"), Session(swarm, name="after")
        await one.open()
        await one.link(None, after)
        await one.link(before, None)
        await asyncio.sleep(0.1)
        assert [message for message, _ in server.requests[1:]] == [
            messages.SetNeighbors(None, "after", after.session_id),
            messages.SetNeighbors("before", None, None),
        ]

    run(scenario)


TERMS = messages.ExitTerms("softmax", ((1, 0.5), (2, 0.5)), "row")
TOKENS = StepLayout((2, 2, 1), (1, 1, 1))


def test_a_token_that_leaves_inside_a_span():
    """What came in with it goes to the server, and where it left is part of the outputs."""

    async def scenario(swarm):
        server = await swarm.add(OPENED, reply(0, left=[1, 2, 0]), reply(1, left=[1, 1, 0]), reply(2))
        one = Session(swarm, early_exits=True)
        await one.open()
        came = [INPUT, replace(INPUT, left=(1, 0, 0)), INPUT]
        for number, hidden in enumerate(came):
            step = Step(number, TOKENS, hidden, exits=TERMS)
            one.progress.on_call_begun(number)
            one.expect(number, step.outputs)
            one.add_input(step)
            await one.deliver(step)
            await asyncio.sleep(0.1)
        assert one.progress.error is None
        assert one.outputs == [
            (0, replace(OUTPUTS, left=(1, 2, 0))),
            (1, replace(OUTPUTS, left=(1, 1, 0))),
            (2, OUTPUTS),
        ]
        assert server.requests[0][0].early_exits
        heard = [message for message, _ in server.requests[1:]]
        assert [(message.exits, message.left) for message in heard] == [
            (TERMS, None),
            (TERMS, [1, 0, 0]),
            (TERMS, None),
        ]

    run(scenario)


def cases(table: list[tuple[str, Any, str]]) -> Any:
    return pytest.mark.parametrize(("answer", "why"), [pytest.param(*row[1:], id=row[0]) for row in table])


@cases(
    [
        *BAD_REPLIES,
        ("a number ahead", reply(1), "unexpected StepReply"),
        *[case for case in bad_payloads(lambda *a, **k: reply(0, *a, **k)) if case[2] != NOT_FINITE],
    ]
)
def test_a_server_that_answers_a_step_wrongly(answer, why):
    async def scenario(_, one):
        await one.ask(0)
        assert isinstance(one.progress.error, ProtocolViolation)
        assert re.search(why, str(one.progress.error))
        assert (one.outputs, one.progress.replied, one.changes) == ([], -1, 1)
        await one.close()

    with_session(scenario, answer)


@cases([case for case in bad_payloads(lambda *a, **k: reply(0, *a, **k)) if case[2] == NOT_FINITE])
def test_nan_is_judged_by_the_chain_because_the_server_may_not_be_to_blame(answer, why):
    async def scenario(_, one):
        await one.ask(0)
        number, claim = next(iter(one.claims.open.items()), None)
        assert number == 0
        assert isinstance(claim.error, NotFiniteOutputs)
        assert claim.checksum == input_checksum(Step(0, LAYOUT, INPUT).request, INPUT.payload)
        assert (one.progress.error, one.outputs, one.progress.replied, one.changes) == (None, [], -1, 1)
        await one.close()

    with_session(scenario, answer)


@pytest.mark.parametrize(
    "answer", [reply(1), reply(7), reply(0, b""), reply(0, OUTPUT + b"x"), reply(0, bytes(10 << 20))]
)
def test_what_another_server_may_have_pushed_is_no_fault_of_the_server(answer):
    """Answers to steps that this client does not know, and outputs of another shape: the chain judges them."""

    async def scenario(swarm):
        await swarm.add(OPENED, answer)
        one, before = Session(swarm), Session(swarm, name="before")
        await one.open()
        await one.link(before, None)
        await one.ask(0)
        number, claim = next(iter(one.claims.open.items()), None)
        assert number == 0
        assert isinstance(claim.error, ProtocolViolation)
        assert (one.progress.error, one.outputs, one.progress.replied) == (None, [], -1)
        await one.close()

    run(scenario)


@cases(
    [
        ("a step", reply(0, b""), "unexpected StepReply"),
        ("checksum", replay_reply(input_checksum=b"x" * 32), "sent something else"),
        *bad_payloads(replay_reply)[-1:],
    ]
)
def test_a_server_that_answers_a_replay_wrongly(answer, why):
    async def scenario(_, one):
        with pytest.raises(ProtocolViolation, match=why):
            await one.replay(LAYOUT, INPUT, 1, want_outputs=True)

    with_session(scenario, answer)


@cases(
    [
        ("payload where none is due", reply(), "payload of 24 bytes"),
        ("wrong type", reply(0, b""), "unexpected StepReply"),
        ("garbage", (msgspec.Raw(b""), b""), "not a valid reply"),
    ]
)
def test_a_server_that_answers_the_opening_wrongly(answer, why):
    async def scenario(swarm):
        server = await swarm.add(answer)
        one = Session(swarm)
        with pytest.raises(ProtocolViolation, match=why):
            await one.open()
        await one.close()
        await asyncio.sleep(0.1)
        assert server.open_streams == 0

    run(scenario)


def test_replays():
    async def scenario(server, one):
        layout = StepLayout((0, 0), (2, 1), None, (4, 0))
        assert await one.replay(layout, INPUT, 7, want_outputs=True) == OUTPUTS
        assert await one.replay(LAYOUT, INPUT, 7, want_outputs=False) is None
        first, second = server.requests[1:]
        assert first == (
            messages.ReplayRequest(7, [0, 0], [2, 1], WireFormat.NONE, "float32", [4, 0], True),
            INPUT.payload,
        )
        assert (second[0].offsets, second[0].return_outputs) == (None, False)

    with_session(scenario, replay_reply(), replay_reply(b""))


@pytest.mark.parametrize("answer", [replay_reply(b""), refusal(CacheFull("no"))], ids=["answered", "refused"])
def test_the_answer_to_an_interrupted_replay_is_not_taken_for_the_next_ones(answer):
    async def scenario(server, one):
        for _ in range(2):
            replay = asyncio.ensure_future(one.replay(LAYOUT, INPUT, 1, want_outputs=False))
            await asyncio.sleep(0.1)
            replay.cancel()
            await asyncio.wait({replay})
        await server.say(*answer)
        assert one.progress.error is None
        replay = asyncio.ensure_future(one.replay(LAYOUT, INPUT, 2, want_outputs=False))
        await server.say(*answer)
        await replay
        assert one.progress.error is None
        await server.say(*replay_reply(b""))
        assert isinstance(one.progress.error, ProtocolViolation)

    with_session(scenario, None, None, replay_reply(b""))


def remote_errors(root: type[RemoteError] = RemoteError) -> list[type[RemoteError]]:
    return [root, *(found for child in root.__subclasses__() for found in remote_errors(child))]


def test_an_unknown_refusal_is_the_servers_fault():
    async def scenario(swarm):
        await swarm.add((messages.Refusal("from_the_future", "because"), b""))
        with pytest.raises(ServerFault, match="because"):
            await Session(swarm).open()

    run(scenario)


def test_a_server_that_says_nothing():
    async def scenario(swarm):
        loop = asyncio.get_running_loop()
        await swarm.add(None)
        with pytest.raises(PeerTimeout, match="did not answer within"):
            await Session(swarm).open()
        assert loop.time() == pytest.approx(OPEN_TIMEOUT_S)
        await swarm.add(OPENED, None, name="later")
        one = Session(swarm, name="later")
        await one.open()
        one.expect(0, OutputShape(3, HIDDEN))
        await one.deliver(Step(0, LAYOUT, INPUT))
        assert 2 < one.progress.deadline - loop.time() < 5
        with pytest.raises(PeerTimeout, match="did not answer within"):
            await one.replay(LAYOUT, INPUT, 1, want_outputs=False)

    run(scenario)


def test_a_server_that_hangs_up():
    async def scenario(swarm):
        await swarm.add("hang up")
        with pytest.raises(PeerLost, match="is gone"):
            await Session(swarm).open()
        await swarm.add(OPENED, "hang up", name="later")
        one = Session(swarm, name="later")
        await one.open()
        await one.ask(0)
        assert type(one.progress.error) is PeerLost
        assert "is gone" in str(one.progress.error)
        with pytest.raises(PeerLost):
            await one.replay(LAYOUT, INPUT, 1, want_outputs=False)
        await one.close()
        with pytest.raises(PeerLost, match="cannot be reached"):
            await Session(swarm, name="nobody").open()

    run(scenario)


def test_an_answer_that_overtakes_the_word_of_the_push_says_nothing_of_the_time():
    """What the servers before took is not this server's: nobody knows when it was handed the step."""

    async def scenario(server, one):
        one.expect(0, OutputShape(3, HIDDEN))
        before = one.progress.clock.timeouts.timeout(3)
        await asyncio.sleep(5)
        await server.say(*reply(0))
        assert one.progress.clock.timing.total == one.progress.clock.timing.compute
        assert one.progress.clock.timeouts.timeout(3) == before
        one.expect(1, OutputShape(3, HIDDEN))
        await asyncio.sleep(5)
        one.progress.on_pushed(1, True, time.perf_counter())
        await asyncio.sleep(0.25)
        await server.say(*reply(1))
        assert 0.25 <= one.progress.clock.timing.total < 1

    with_session(scenario)


def test_answers_that_come_twice_or_late_are_ignored():
    async def scenario(server, one):
        small = OutputShape(1, HIDDEN)
        await one.ask(0)
        await server.say(*reply(0))
        await server.say(*reply(0))
        one.expect(1, small)
        await server.say(*reply(0))  # larger than what is due now
        await server.say(*reply(1, b"1" * 8))
        await server.say(*reply(1, b"1" * 8))
        assert [number for number, _ in one.outputs] == [0, 1]
        assert one.progress.error is None

    with_session(scenario)


@pytest.mark.parametrize("late", [reply(0), refusal(NotFinite("no"))], ids=["answered", "refused"])
def test_answers_to_steps_that_were_given_up_are_ignored(late):
    async def scenario(server, one):
        await one.ask(0)
        one.give_up(-1, copied_rows=False)
        await server.say(*late)
        assert (one.outputs, one.progress.replied, one.progress.error) == ([], -1, None)
        await one.ask(1)
        await server.say(*reply(1))
        await server.say(*reply(0))
        assert [number for number, _ in one.outputs] == [1]
        assert one.progress.error is None

    with_session(scenario)


def test_a_server_may_say_at_any_time_that_it_leaves():
    async def scenario(server, one):
        await server.say(*refusal(ServerClosing("leaving")))
        assert isinstance(one.progress.leaving, ServerClosing)
        assert one.progress.error is None
        assert one.changes >= 1
        # What it still answers is welcome.
        one.expect(0, OutputShape(3, HIDDEN))
        await server.say(*reply(0))
        assert one.outputs == [(0, OUTPUTS)]

    with_session(scenario)


def test_the_first_error_counts():
    async def scenario(server, one):
        await server.say(*refusal(ServerFault("broken")))
        server.streams[-1].close()
        await asyncio.sleep(0.1)
        assert isinstance(one.progress.error, ServerFault)

    with_session(scenario)


def test_a_server_that_refuses_a_step_and_answers_it_all_the_same_has_not_answered_it():
    """Nobody would hand the outputs on: the hop behind would wait for them for ever."""

    async def scenario(server, one):
        await one.ask(0)
        await asyncio.sleep(0.1)
        await server.say(*reply(0, input_checksum=input_checksum(*server.requests[-1])))
        assert isinstance(one.progress.error, WrongPosition)
        assert (one.progress.replied, one.outputs) == (-1, [])

    with_session(scenario, (messages.refusal(WrongPosition("no"), 0), b""))


def test_opening_again_forgets_what_was_under_way():
    async def scenario(swarm):
        server = await swarm.add((messages.SessionOpened(7), b""))
        one = Session(swarm)
        await one.open()
        await one.ask(0)
        one.progress.on_pushed(1, True, time.perf_counter())
        await server.say(*refusal(UnknownSession("who?")))
        server.streams[-1].close()
        await asyncio.sleep(0.1)
        assert one.progress.error is not None
        assert await one.open() == 7
        assert (one.progress.error, one.progress.delivered, one.progress.pushed) == (None, -1, -1)

    run(scenario)


def test_a_session_is_used_between_opening_and_closing():
    async def scenario(swarm):
        server = await swarm.add(OPENED)
        one = Session(swarm)
        await one.ask(0)
        assert "not connected" in str(one.progress.error)
        await one.open()
        await one.close()
        await one.close()
        await one.ask(1)
        assert "not connected" in str(one.progress.error)
        assert server.asked == [messages.OpenSession, messages.CloseSession]

    run(scenario)


def test_a_server_that_has_stopped_reading():
    async def scenario(swarm):
        loop = asyncio.get_running_loop()
        server = await swarm.add(OPENED)
        one = Session(swarm)
        await one.open()
        swarm.hub.hang("server")
        tokens = 1 << 16
        large = PackedHidden(bytes(tokens * HIDDEN * 4), tokens, HIDDEN, WireFormat.NONE, "float32")
        await one.deliver(Step(0, StepLayout((0,), (tokens,)), large))
        assert isinstance(one.progress.error, PeerTimeout)
        assert "read nothing" in str(one.progress.error)
        began = loop.time()
        await one.close()
        assert loop.time() - began < 2
        swarm.hub.resume("server")
        await asyncio.sleep(1)
        assert server.open_streams == 0

    run(scenario)


def test_an_answer_that_leaves_one_out_is_not_taken():
    """The one before was lost and cannot be told again; what comes next would leave a hole in the record."""

    async def scenario(server, one):
        await one.ask(0)
        await one.ask(1)
        await server.say(*reply(1))
        assert (one.outputs, one.progress.replied, one.progress.stale, one.progress.error) == ([], -1, True, None)
        for _ in range(MAX_RETRIES):
            one.progress.on_repair_ended(None)
        await server.say(*reply(1))
        assert isinstance(one.progress.error, ProtocolViolation)

    with_session(scenario)


def test_the_refusal_of_a_push_is_not_taken_for_that_of_the_clients_own_copy():
    async def scenario(server, one):
        refused = messages.refusal(WrongPosition("a step is missing"), 1)
        for number in range(2):
            one.expect(number, OutputShape(3, HIDDEN))
        one.progress.on_pushed(0, True, time.perf_counter())
        one.progress.on_pushed(1, True, time.perf_counter())
        assert one.progress.pushed == 1
        await one.deliver(Step(0, LAYOUT, INPUT))
        await one.deliver(Step(1, LAYOUT, INPUT))
        await server.say(refused, b"")
        assert (one.progress.error, one.progress.push_refused) == (None, True)
        await server.say(refused, b"")
        assert isinstance(one.progress.error, WrongPosition)

    with_session(scenario)


def test_a_refusal_is_the_error_that_it_was():
    """On opening, of a step, and of a replay."""
    why = r"server …\w+ \(blocks 0:3\) refused: because"
    for kind in remote_errors():

        async def scenario(swarm, kind=kind):
            await swarm.add(OPENED, (messages.refusal(kind("because"), 0), b""), refusal(kind("because")))
            await swarm.add(refusal(kind("because")), name="strict")
            one = Session(swarm)
            with pytest.raises(RemoteError, match=why) as caught:
                await Session(swarm, name="strict").open()
            assert type(caught.value) is kind
            await one.open()
            await one.ask(0)
            assert type(one.progress.error) is kind
            assert re.search(why, str(one.progress.error))
            with pytest.raises(RemoteError, match=why) as caught:
                await one.replay(LAYOUT, INPUT, 1, want_outputs=False)
            assert type(caught.value) is kind

        run(scenario)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_pushed_and_refused_is_not_its_fault(is_known):
    async def scenario(server, one):
        one.expect(0, OutputShape(3, HIDDEN))
        if is_known:
            one.progress.on_pushed(0, True, time.perf_counter())
        await server.say(*refusal(NotFinite("no")))
        assert one.progress.error is None
        assert one.progress.pushed == -1  # so that the client hands over its own copy
        await one.ask(0)
        await server.say(*refusal(NotFinite("no")))
        assert isinstance(one.progress.error, NotFinite)

    with_session(scenario)


def test_what_a_server_that_was_away_can_still_tell():
    async def scenario(server, one):
        for number in range(4):
            await one.ask(number)
        for number in range(2):
            await server.say(*reply(number))
        assert [one.progress.can_answer(number) for number in range(5)] == [False, False, True, True, False]

    with_session(scenario)
