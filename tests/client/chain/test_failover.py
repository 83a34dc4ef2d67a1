"""Servers are lost at every moment of a session; the outputs are those of the undisturbed model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from swarm.client.hops.hop_session import HopSession
from swarm.data_structures import StepLayout
from swarm.errors import (
    AdapterRefused,
    CacheFull,
    MissingBlocks,
    PeerLost,
    PeerTimeout,
    RemoteError,
    ServerClosing,
    TooLong,
    WrongDtype,
)
from swarm.protocol import messages
from tests import virtual_time
from tests.client.chains import CLIENT, NAMES, ONCE, TWICE, Conversation, Swarm, disturb, now
from tests.slow import slow_except


def at_first(kind: type, source: str, target: str, act: Callable[[], None], lost: bool = True) -> Callable[..., bool]:
    """Do something when the first message of a kind goes from one peer to another, which then may be lost."""
    done = []

    def watch(one: str, other: str, message: messages.Message) -> bool:
        if not done and isinstance(message, kind) and source in (one, "*") and target in (other, "*"):
            done.append(True)
            act()
            return lost
        return False

    return watch


def others_were_left_alone(swarm: Swarm, *replaced: str) -> None:
    for name in NAMES:
        if name not in replaced:
            assert swarm.servers[name].count(messages.OpenSession) == 1, name
            assert swarm.servers[name].count(messages.ReplayRequest) == 0, name


async def everything(talk: Conversation) -> None:
    """A prefill, tokens, more of a prompt, a beam search, a rollback."""
    await talk.prefill((3, 0), (0, 2), (0, 3))
    await talk.append(1, 1)
    await talk.step(StepLayout((4, 6), (1, 1), (1, 1)))
    await talk.step(StepLayout((3, 2), (1, 3)))
    await talk.append(1, 1)


FAULTS = ["kill source", "kill target", "kill after", "hang source", "hang target", "lose"]


@pytest.mark.parametrize("fault", slow_except(FAULTS, "kill target", "kill after", "hang source", "lose"))
@pytest.mark.parametrize("push", slow_except([True, False], True))
def test_one_fault_at_any_message(span_model, fault, push):
    """Each message of a whole session in turn is the one at which something happens."""

    def play(chosen: int) -> int:
        count = 0

        async def scenario() -> None:
            swarm = Swarm(span_model, TWICE, push=push)

            def watch(source: str, target: str, message: messages.Message) -> bool:
                nonlocal count
                count += 1
                if count != chosen:
                    return False
                server = target if source == CLIENT or fault.endswith("target") else source
                if server == CLIENT:
                    server = source
                if fault == "kill after":
                    swarm.kill_soon(server)
                elif fault.startswith("kill"):
                    swarm.kill(server)
                elif fault.startswith("hang"):
                    swarm.hub.hang(server)
                return fault == "lose"

            swarm.on_message = watch
            await swarm.start()
            talk = await swarm.chain()
            await everything(talk)
            assert len(swarm.planner.failures) <= 1, swarm.planner.failures
            await talk.chain.close()

        virtual_time.run(scenario)
        return count

    total = play(0)
    assert total > 30
    for chosen in range(1, total + 1):
        play(chosen)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_else_starts_again(span_model, name):
    async def act(swarm, talk):
        swarm.kill(name)
        began = now()
        await talk.append(1, 1)
        assert now() - began < 0.2  # an open, a replay, the step: 20 ms of travel each, and 10 ms for each computation
        assert [peer for peer, _ in swarm.planner.failures] == [name]
        others_were_left_alone(swarm, name)
        assert swarm.servers[name + "2"].count(messages.ReplayRequest) == 1
        expected = " ".join(f"{2 * i}:{2 * i + 2}@{n + '2' if n == name else n}" for i, n in enumerate(NAMES))
        assert swarm.planner.routes[-1] == expected
        # The new server is linked with its neighbors: the next token goes straight from one to the next.
        began = now()
        await talk.append(1, 1)
        assert now() - began == pytest.approx(0.07)

    disturb(span_model, act)


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_hangs_is_overtaken_and_reported_when_its_time_is_over(span_model, name, push):
    async def act(swarm, talk):
        for _ in range(8):  # it is known how long they take
            await talk.append(1, 1)
        swarm.hub.hang(name)
        began = now()
        await talk.append(1, 1)
        assert now() - began < 1
        assert swarm.planner.overtaken == [name]
        assert swarm.planner.failures == []
        await asyncio.sleep(10)
        ((peer, error),) = swarm.planner.failures
        assert peer == name
        assert isinstance(error, PeerTimeout)
        others_were_left_alone(swarm, name)

    disturb(span_model, act, push=push)


@pytest.mark.parametrize("name", ["b"])
def test_a_server_that_hangs_while_nobody_else_may_be_asked_is_replaced_soon(span_model, name):
    """Long before the request timeout of a minute."""

    async def act(swarm, talk):
        swarm.planner.has_alternatives = False
        swarm.hub.hang(name)
        began = now()
        await talk.append(1, 1)
        assert now() - began < 10
        assert isinstance(swarm.planner.failures[0][1], PeerTimeout)
        others_were_left_alone(swarm, name)

    disturb(span_model, act)


@pytest.mark.parametrize(("names", "push"), [(("a", "b"), True), (("a", "b", "c"), False)])
def test_several_failures_at_once(span_model, names, push):
    async def act(swarm, talk):
        for name in names:
            swarm.kill(name)
        await talk.step(StepLayout((4, 4), (1, 2), (1, 1)))
        others_were_left_alone(swarm, *names)

    disturb(span_model, act, push=push)


@pytest.mark.parametrize(
    "kind", [messages.OpenSession, messages.ReplayRequest, messages.ReplayReply, messages.SetNeighbors]
)
@pytest.mark.parametrize("name", ["b"])
def test_the_replacement_fails_too(span_model, name, kind):
    async def act(swarm, talk):
        first, second = name + "2", name + "3"
        await swarm.add(second, *TWICE[name])
        source, target = (first, CLIENT) if kind is messages.ReplayReply else (CLIENT, first)
        swarm.on_message = at_first(kind, source, target, lambda: swarm.kill(first))
        swarm.kill(name)
        await talk.append(1, 1)
        assert [peer for peer, _ in swarm.planner.failures] == [name, first]
        assert second in swarm.planner.routes[-1]
        others_were_left_alone(swarm, name)

    disturb(span_model, act)


@pytest.mark.parametrize("neighbor", ["a", "c"])
def test_a_neighbor_fails_during_the_replay(span_model, neighbor):
    async def act(swarm, talk):
        swarm.on_message = at_first(messages.ReplayRequest, CLIENT, "b2", lambda: swarm.kill(neighbor), lost=False)
        swarm.kill("b")
        await talk.append(1, 1)
        others_were_left_alone(swarm, "b", neighbor)

    disturb(span_model, act)


CHUNKS = ((1, 2), (0, 2), (2, 0), (1, 1), (3, 0), (0, 1), (1, 1), (1, 2))


@pytest.mark.parametrize(("name", "push"), [("a", False), ("b", True), ("c", True)])
def test_in_the_middle_of_a_long_prompt(span_model, name, push):
    """What was answered is replayed in one request, what was not is delivered again; the other servers go on."""

    async def act(swarm, talk):
        replies = []

        def watch(source, target, message):
            if source == name and target == CLIENT and isinstance(message, messages.StepReply):
                replies.append(message.step)
                if len(replies) == 4:
                    swarm.kill_soon(name)
            return False

        swarm.on_message = watch
        await talk.prefill(*CHUNKS)
        assert [peer for peer, _ in swarm.planner.failures] == [name]
        others_were_left_alone(swarm, name)
        replacement = swarm.servers[name + "2"]
        assert replacement.count(messages.ReplayRequest) == 1
        assert replacement.runtime.jobs < 1 + len(CHUNKS)
        for other in NAMES:
            if other != name:
                assert swarm.servers[other].runtime.jobs == 2 + len(CHUNKS)

    disturb(span_model, act, push=push)


@pytest.mark.parametrize("name", ["b"])
def test_leaving_in_the_middle_of_a_long_prompt(span_model, name):
    async def act(swarm, talk):
        server = swarm.servers[name]

        def leave() -> None:
            server.handler.closing = True
            asyncio.get_running_loop().create_task(server.handler.hand_over())

        swarm.on_message = at_first(messages.StepReply, name, CLIENT, leave, lost=False)
        began = now()
        await talk.prefill(*CHUNKS)
        await talk.append(1, 1)
        assert now() - began < 1
        assert [(peer, type(why)) for peer, why in swarm.planner.failures] == [(name, ServerClosing)]
        others_were_left_alone(swarm, name)

    disturb(span_model, act)


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "c")])
def test_a_push_lost_in_the_middle_of_a_long_prompt_is_noticed_by_what_follows_it(span_model, source, target):
    """The next chunk is refused, because it begins beyond the end of the cache: nobody has to wait until it is late."""

    async def act(swarm, talk):
        swarm.on_message = at_first(messages.PushRequest, source, target, lambda: None)
        began = now()
        await talk.prefill(*CHUNKS)
        assert now() - began < 0.5
        assert 1 <= swarm.servers[target].count(messages.StepRequest) <= len(CHUNKS)
        assert swarm.planner.failures == []
        others_were_left_alone(swarm)
        # Afterwards they push again: it was the way, not the servers.
        await talk.append(1, 1)
        before = swarm.servers[target].count(messages.StepRequest)
        await talk.append(1, 1)
        assert swarm.servers[target].count(messages.StepRequest) == before

    disturb(span_model, act, ONCE)


CUTS = [
    pytest.param({"x": (2, 3), "y": (3, 4)}, "0:2@a 2:3@x 3:4@y 4:6@c", id="one by two"),
    pytest.param({"x": (0, 6)}, "0:2@a 2:4@x 4:6@c", id="entered and left in the middle"),
    pytest.param({"x": (1, 3), "y": (2, 5)}, None, id="two that overlap"),
    pytest.param({"x": (0, 3), "y": (3, 6)}, "0:2@a 2:3@x 3:4@y 4:6@c", id="two that hold more"),
]


@pytest.mark.parametrize("push", [True])
@pytest.mark.parametrize(("replacements", "route"), CUTS)
def test_spans_may_be_cut_differently(span_model, replacements, route, push):
    async def act(swarm, talk):
        for name, span in replacements.items():
            await swarm.add(name, *span)
        await swarm.planner.refresh()
        swarm.kill("b")
        await talk.append(1, 1)
        if route is not None:
            assert swarm.planner.routes[-1] == route
        others_were_left_alone(swarm, "b")
        # The record of what went into the second part was made by the replay: it has to be right, too.
        last = talk.chain.route.hops[-2].server.peer_id
        await swarm.add("z", 2, 4)
        await swarm.planner.refresh()
        swarm.kill(last)
        await talk.step(StepLayout((5, 5), (1, 1), (1, 0)))

    disturb(span_model, act, ONCE, push=push)


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_a_server_with_two_hops_in_a_row_pushes_nothing_to_itself(span_model, end):
    """It has taken the place of two servers, one after the other, and then ends, too."""

    async def act(swarm, talk):
        await swarm.add("c", 0, 6)
        await swarm.planner.refresh()
        for name in ("a", "b"):
            swarm.kill(name)
            await talk.append(1, 1)
        assert swarm.planner.routes[-1] == "0:2@c 2:6@c"
        await swarm.add("d", 0, 2)
        await swarm.add("e", 2, 6)
        await swarm.planner.refresh()
        before = swarm.servers["c"].count(messages.PushRequest)
        await talk.append(1, 1)
        assert swarm.servers["c"].count(messages.PushRequest) == before
        if end == "kill":
            swarm.kill("c")
        else:
            swarm.servers["c"].handler.closing = True
            await swarm.servers["c"].handler.hand_over()
        await everything(talk)
        assert {route.split("@")[-1] for route in swarm.planner.routes[-1].split()} <= {"d", "e"}

    disturb(span_model, act, {"a": (0, 2), "b": (2, 6)})


def test_no_step_overtakes_what_a_new_server_still_lacks(span_model):
    """The last server answers a step that copies rows; the one before it dies before it has said so. The next step,
    which copies rows too, is on its way to the replacement before the client has handed that the first one."""
    servers = {"a": (0, 1), "b": (1, 2), "c": (2, 4), "d": (4, 6), "c2": (2, 4)}

    async def act(swarm, talk):
        swarm.on_message = lambda source, target, message: source == "c" and isinstance(message, messages.StepReply)
        await talk.step(StepLayout((4, 6), (1, 1), (1, 0)))
        swarm.servers["b"].runtime._seconds = 0.5

        def watch(source: str, target: str, message: messages.Message) -> bool:
            if isinstance(message, messages.PushRequest) and target == "b":
                swarm.kill("c")
            elif isinstance(message, messages.StepRequest) and target == "c2":
                swarm.hub.delay = lambda one, other: 1.0 if (one, other) == (CLIENT, "c2") else 0.01
            return False

        swarm.on_message = watch
        await talk.step(StepLayout((4, 4), (1, 1), (1, 0)))
        assert swarm.planner.routes[-1] == "0:1@a 1:2@b 2:4@c2 4:6@d"

    disturb(span_model, act, servers)


def tampering(act: Callable[[Any, Any], Any], kind: type = messages.StepReply) -> Callable[[Any, Any], Any]:
    return lambda message, payload: act(message, payload) if isinstance(message, kind) else (message, payload)


WRONG = {
    "nan": lambda message, payload: (message, b"\xff" * len(payload)),
    "short": lambda message, payload: (message, bytes(payload)[:-4]),
    "huge": lambda message, payload: (message, bytes(10 << 20)),
    "other type": lambda message, payload: (messages.InfoReply(0, 2, 0, 0, "1"), b""),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_server_that_answers_wrongly_is_replaced(span_model, name, wrong):
    async def act(swarm, talk):
        swarm.servers[name].tamper = tampering(WRONG[wrong])
        await talk.append(1, 1)
        assert [peer for peer, _ in swarm.planner.failures] == [name]
        # An answer that is too large may be that to a step which another server has made up, and so may those behind.
        others_were_left_alone(swarm, name, *("c" if (name, wrong) == ("b", "huge") else ""))

    disturb(span_model, act)


@pytest.mark.parametrize("wrong", ["nan", "short", "huge"])
@pytest.mark.parametrize("name", ["b"])
@pytest.mark.parametrize("silent", [True, False])
def test_a_server_that_pushes_wrongly_does_not_bring_the_next_one_into_disrepute(span_model, name, wrong, silent):
    """It may also keep its answer to itself, so that the next one's refusal is all that the client hears."""

    async def act(swarm, talk):
        swarm.servers[name].tamper = tampering(WRONG[wrong], messages.PushRequest)
        if silent:
            swarm.on_message = lambda source, target, message: source == name and target == CLIENT
        await talk.append(1, 1)
        if silent:
            await asyncio.sleep(30)  # it is overtaken, and reported when its time is over
        assert [peer for peer, _ in swarm.planner.failures] == ([name] if silent else [])

    disturb(span_model, act)


@pytest.mark.parametrize("error", [CacheFull, ServerClosing, TooLong, AdapterRefused])
@pytest.mark.parametrize("name", ["b"])
def test_a_replacement_that_refuses_is_not_the_only_one(span_model, name, error):
    async def act(swarm, talk):
        refusal = messages.refusal(error("because"))
        swarm.servers[name + "2"].tamper = tampering(lambda message, payload: (refusal, b""), messages.SessionOpened)
        await swarm.add(name + "3", *TWICE[name])
        await swarm.planner.refresh()
        swarm.kill(name)
        await talk.append(1, 1)
        assert [(peer, type(why)) for peer, why in swarm.planner.failures] == [(name, PeerLost), (name + "2", error)]

    disturb(span_model, act)


def refuse_step(error, message, payload):
    """In the place of the answer to a step."""
    return messages.refusal(error, message.step), b""


@pytest.mark.parametrize("name", ["b"])
def test_two_servers_that_refuse_a_step_for_different_reasons_do_not_agree(span_model, name):
    """One server's word that no server would compute a step is doubted, and so is that of two which contradict it."""
    refusals = {name: TooLong("because"), name + "2": WrongDtype("because")}

    async def act(swarm, talk):
        await swarm.add(name + "3", *TWICE[name])
        await swarm.planner.refresh()
        for liar, error in refusals.items():
            refuse = partial(refuse_step, error)
            swarm.servers[liar].tamper = tampering(refuse, messages.StepReply)
        await talk.append(1, 1)
        await talk.append(1, 1)

    disturb(span_model, act, push=False)


@pytest.mark.parametrize("name", ["b"])
def test_a_server_without_room_for_more_rows(span_model, name):
    async def act(swarm, talk):
        pool = swarm.servers[name].sessions._pool
        pool.capacity = pool.quota = 2 * 64  # two rows
        await talk.step(StepLayout((4, 4, 4), (1, 1, 1), (0, 1, 1)))
        assert [(peer, type(why)) for peer, why in swarm.planner.failures] == [(name, CacheFull)]
        others_were_left_alone(swarm, name)
        await talk.step(StepLayout((5, 5), (1, 1), (2, 0)))

    disturb(span_model, act)


def test_room_for_more_rows_is_waited_for_but_not_as_long_as_for_blocks(span_model):
    async def act(swarm, talk):
        pool = swarm.servers["b"].sessions._pool
        pool.capacity = pool.quota = 2 * 64  # two rows
        began = now()
        with pytest.raises(CacheFull, match="192 tokens of attention cache are needed"):
            await talk.step(StepLayout((4, 4, 4), (1, 1, 1), (0, 1, 1)))
        assert 60 <= now() - began < 90

        pool.capacity = pool.quota = 3 * 64
        await talk.chain.resume()
        await talk.step(StepLayout((4, 4, 4), (1, 1, 1), (0, 1, 1)))

    disturb(span_model, act, ONCE, missing_blocks_timeout=1800)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("amid", [True, False])
def test_a_server_that_leaves(span_model, name, amid):
    async def act(swarm, talk):
        server = swarm.servers[name]
        tasks = []

        def leave() -> None:
            server.handler.closing = True
            tasks.append(asyncio.ensure_future(server.handler.hand_over()))

        if amid:
            swarm.on_message = at_first(messages.StepRequest, CLIENT, "a", leave, lost=False)
        else:
            leave()
            await asyncio.sleep(1)
        await talk.append(1, 1)
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        began = now()
        await talk.append(1, 1)
        assert [(peer, type(why)) for peer, why in swarm.planner.failures] == [(name, ServerClosing)]
        others_were_left_alone(swarm, name)
        assert amid or len(server.sessions) == 0
        assert now() - began < 0.3

    disturb(span_model, act)


@pytest.mark.parametrize(("name", "push"), [("a", True), ("b", False)])
def test_a_server_that_lost_its_sessions_but_lives_is_filled_again(span_model, name, push):
    async def act(swarm, talk):
        swarm.servers[name].sessions.clear()
        await talk.append(1, 1)
        assert swarm.planner.failures == []
        assert swarm.servers[name].count(messages.ReplayRequest) == 1
        others_were_left_alone(swarm, name)

    disturb(span_model, act, ONCE, push=push)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_connection_that_broke_is_opened_again_and_nothing_is_replayed(span_model, name):
    async def act(swarm, talk):
        for session in list(swarm.servers[name].sessions._sessions.values()):
            session.client.close()
        await asyncio.sleep(0.1)
        await talk.append(1, 1)
        assert swarm.planner.failures == []
        assert swarm.servers[name].count(messages.OpenSession) == 2
        assert swarm.servers[name].count(messages.ReplayRequest) == 0

    disturb(span_model, act, ONCE)


@pytest.mark.parametrize(("name", "push"), [("a", True), ("b", False), ("c", True)])
def test_a_lost_reply_is_asked_for_again_and_computed_once(span_model, name, push):
    async def act(swarm, talk):
        server = swarm.servers[name]
        before = server.runtime.jobs

        def break_off() -> None:
            for session in server.sessions._sessions.values():
                session.client.close()

        swarm.on_message = at_first(messages.StepReply, name, CLIENT, break_off)
        await talk.append(1, 1)
        await talk.append(1, 1)
        assert server.runtime.jobs == before + 2
        assert swarm.planner.failures == []

    disturb(span_model, act, ONCE, push=push)


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "c")])
def test_a_lost_push_is_delivered_by_the_client(span_model, source, target):
    async def act(swarm, talk):
        swarm.on_message = at_first(messages.PushRequest, source, target, lambda: None)
        began = now()
        await talk.append(1, 1)
        assert now() - began < 10
        assert swarm.servers[target].count(messages.StepRequest) == 1
        assert swarm.planner.failures == []
        others_were_left_alone(swarm)

    disturb(span_model, act, ONCE)


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "c")])
def test_servers_that_cannot_reach_each_other_are_joined_by_the_client(span_model, source, target):
    async def act(swarm, talk):
        for link in [session.push_link for session in swarm.servers[source].sessions._sessions.values()]:
            link.close()
        for _ in range(3):
            began = now()
            await talk.append(1, 1)
            assert now() - began < 0.1

    disturb(span_model, act, ONCE)


def test_beam_search_then_a_failure_in_a_step_that_is_interrupted(span_model):
    """A record must not hold the copying of a step that was given up: it will be asked for once more."""

    async def act(swarm, talk):
        # b answers, dies, and is replaced while c has not answered; then the person interrupts.
        swarm.servers["c"].runtime._seconds = 1.0
        swarm.on_message = at_first(messages.StepReply, "b", CLIENT, lambda: swarm.kill_soon("b"), lost=False)
        layout = StepLayout((4, 4), (1, 1), (1, 0))
        step = asyncio.ensure_future(talk.step(layout))
        await asyncio.wait({step}, timeout=0.8)
        assert "b2" in swarm.planner.routes[-1]
        step.cancel()
        await asyncio.wait({step})
        swarm.kill("b2")
        await swarm.add("b3", 2, 4)
        await talk.step(layout)
        await talk.append(1, 1)

    disturb(span_model, act)


def test_a_hop_that_answered_before_its_input_was_known_is_filled_with_what_is_known(span_model):
    """a's copy for the client was still under way when the last server answered, and then both a and b died."""

    async def act(swarm, talk):
        swarm.on_message = at_first(messages.StepReply, "a", CLIENT, lambda: None)
        await talk.step(StepLayout((4, 4), (1, 1), (1, 0)))
        swarm.kill("a")
        swarm.kill("b")
        # It goes on before the rows that were copied, so that nobody would notice by their lengths if they were not.
        await talk.step(StepLayout((4, 4), (1, 1)))
        assert [peer for peer, _ in swarm.planner.failures] == ["a", "b"]

    disturb(span_model, act)


def test_a_new_server_that_is_pushed_what_was_given_up_before_is_not_suspected(span_model):
    """It has not been filled with anything, so it computes that step, and answers it."""

    async def scenario():
        swarm = Swarm(span_model, TWICE)
        await swarm.start()
        talk = await swarm.chain()
        delay = swarm.hub.delay
        swarm.hub.delay = lambda source, target: 0.5 if (source, target) == ("a", "b") else delay(source, target)
        step = asyncio.ensure_future(talk.append(3, 5))
        await asyncio.sleep(0.05)  # on its way from a to b
        step.cancel()
        await asyncio.wait({step})
        swarm.kill("c")
        await talk.append(3, 5)
        await talk.append(1, 1)
        pushes = [one for _, one in swarm.servers["c2"].heard if isinstance(one, messages.PushRequest)]
        assert [push.step.step for push in pushes] == [0, 1, 2]
        assert swarm.planner.distrusted == []
        assert [peer for peer, _ in swarm.planner.failures] == ["c"]
        await talk.chain.close()

    virtual_time.run(scenario)


def test_nobody_holds_the_blocks_until_somebody_comes(span_model, caplog):
    async def act(swarm, talk):
        swarm.kill("b")
        del swarm.announced["b"]
        step = asyncio.ensure_future(talk.append(1, 1))
        await asyncio.sleep(20)
        assert not step.done()
        assert swarm.planner.refreshed > 10
        with caplog.at_level(logging.WARNING, "swarm"):
            await swarm.add("later", 1, 5)
            began = now()
            await step
        assert now() - began < 2

    disturb(span_model, act, ONCE, missing_blocks_timeout=60)


@pytest.mark.parametrize(
    ("name", "how", "sources"), [("a", "resume", None), ("b", "another step", (1, 0)), ("c", "resume", (1, 0))]
)
def test_missing_blocks_are_named_and_the_session_can_be_resumed(span_model, caplog, name, how, sources):
    async def act(swarm, talk):
        start, end = TWICE[name]
        swarm.kill(name)
        layout = StepLayout((4, 4), (1, 1), sources)
        for _ in range(2):
            began = now()
            with pytest.raises(MissingBlocks, match=f"blocks {start}:{end} are missing") as caught:
                await talk.step(layout)
            assert caught.value.blocks == (start, start + 1)
            assert 4.9 < now() - began < 10
        assert [peer for peer, _ in swarm.planner.failures] == [name]  # once, however often it was tried
        assert sum("are missing" in line.message and "Waiting up to 5 s" in line.message for line in caplog.records)
        await asyncio.sleep(30)  # the ban of the lost server is over by now
        await swarm.add(name, start, end)
        if how == "resume":
            await talk.chain.resume()
            assert swarm.planner.routes[-1] == swarm.planner.routes[0]
            assert swarm.servers[name].count(messages.ReplayRequest) == 1
            await talk.chain.resume()  # nothing to do
        began = now()
        await talk.step(layout)
        assert now() - began < 1
        others_were_left_alone(swarm, name) if sources is None else None

    disturb(span_model, act, ONCE, missing_blocks_timeout=5)


@pytest.mark.parametrize("missing_blocks_timeout", [0.0, 5.0])
def test_opening_tries_other_servers(span_model, missing_blocks_timeout):
    async def scenario():
        swarm = Swarm(span_model, TWICE, missing_blocks_timeout=missing_blocks_timeout)
        await swarm.start()
        swarm.kill("a")
        refusal = messages.refusal(CacheFull("no room"))
        swarm.servers["b"].tamper = tampering(lambda message, payload: (refusal, b""), messages.SessionOpened)
        talk = await swarm.chain()
        assert swarm.planner.routes == ["0:2@a2 2:4@b2 4:6@c"]
        await talk.append(2)
        # What was opened in vain was closed again.
        assert [len(swarm.servers[name].sessions) for name in ("a2", "b", "b2", "c")] == [1, 0, 1, 1]

    virtual_time.run(scenario)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(CacheFull, CacheFull), (TooLong, TooLong), (AdapterRefused, AdapterRefused), (ServerClosing, MissingBlocks)],
)
def test_opening_says_why_nobody_can_be_used(span_model, error, raised):
    async def scenario():
        swarm = Swarm(span_model, {"a": (0, 3), "b": (3, 6)}, missing_blocks_timeout=0.0)
        await swarm.start()
        refusal = messages.refusal(error("because"))
        swarm.servers["b"].tamper = tampering(lambda message, payload: (refusal, b""), messages.SessionOpened)
        with pytest.raises((RemoteError, MissingBlocks)) as caught:
            await swarm.chain()
        assert type(caught.value) is raised
        is_servers_fault = error not in (TooLong, AdapterRefused)  # others may go on to use it
        assert [peer for peer, _ in swarm.planner.failures] == (["b"] if is_servers_fault else [])
        await asyncio.sleep(1)
        assert not swarm.hub.tasks

    virtual_time.run(scenario)


def test_an_opening_that_is_interrupted_when_all_is_open_leaves_nothing_behind(span_model, monkeypatch):
    linking = asyncio.Event()

    async def link(*_: object) -> None:
        linking.set()
        await asyncio.Event().wait()

    async def scenario():
        swarm = Swarm(span_model, {"a": (0, 3), "b": (3, 6)})
        await swarm.start()
        monkeypatch.setattr(HopSession, "link", link)
        opening = asyncio.ensure_future(swarm.chain())
        await linking.wait()
        opening.cancel()
        await asyncio.wait({opening})
        await asyncio.sleep(1)
        assert not swarm.hub.tasks

    virtual_time.run(scenario)
