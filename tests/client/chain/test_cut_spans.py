"""Sessions that cut their servers' spans: what goes into each part comes by, and a server is lost as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from swarm.client.routes.events import HopLost, Recovered, RouteTaken
from swarm.data_structures import Span, StepLayout
from swarm.errors import CacheFull, MissingBlocks, PeerLost, ServerClosing
from swarm.protocol import messages
from swarm.server.sessions.pushing import local_push_link
from tests import virtual_time
from tests.client.chains import BLOCKS, CLIENT, Conversation, Server, Swarm

TWO = {"a": (0, 6), "b": (0, 6)}
THREE = {"a": (0, 2), "b": (2, 6), "b2": (2, 6)}
CUTS = (2, 4)


def run(
    span_model: Any,
    servers: dict[str, tuple[int, int]],
    act: Callable[[Swarm, Conversation], Awaitable[None]],
    boundaries: tuple[int, ...] = CUTS,
    **options: Any,
) -> None:
    """Let `act` disturb a session that has made its first steps, and look whether it goes on."""

    async def scenario() -> None:
        swarm = Swarm(span_model, servers, **options)
        await swarm.start()
        talk = await swarm.chain(boundaries=boundaries)
        await talk.prefill((3, 0), (0, 2), (0, 3))
        await talk.step(StepLayout((5, 3), (1, 1), (1, 0)))
        await act(swarm, talk)
        await talk.append(1, 1)
        await talk.step(StepLayout((2, 3), (1, 1), (1, 0)))
        await talk.chain.close()

    virtual_time.run(scenario)


def failed(swarm: Swarm) -> list[tuple[str, type]]:
    """Which servers were reported, and why."""
    return [(peer, type(error)) for peer, error in swarm.planner.failures]


def count(swarm: Swarm, kind: type) -> int:
    return sum(isinstance(event, kind) for event in swarm.events)


@pytest.mark.parametrize(("push", "older"), [(True, False), (True, True), (False, False)])
def test_what_goes_into_each_part_of_a_span_comes_by(span_model, push, older):
    """Also where an older server is told to push to itself, which libp2p refuses: then the client hands on."""

    async def act(swarm, talk):
        before = swarm.servers["a"].count(messages.StepRequest)
        assert swarm.planner.routes == ["0:2@a 2:4@a 4:6@a"]
        assert talk.chain.boundaries == CUTS
        assert len(swarm.servers["a"].sessions) == 3
        number = talk.chain.next_number
        await talk.append(1, 1)
        assert [hop.history.get(number).number for hop in talk.chain._hops] == [number] * 3
        assert len(talk.chain.timings) == 3
        sent = swarm.servers["a"].count(messages.StepRequest) - before
        assert sent == (1 if push and not older else 3)

    run(span_model, TWO, act, push=push, older=older)


def test_servers_are_told_once_that_a_step_is_waited_for_which_might_have_left(span_model):
    async def act(swarm, talk):
        def told() -> list[int]:
            return [message.last for _, message in swarm.servers["a"].heard if isinstance(message, messages.Expedite)]

        async def wait(number: int, block: int) -> float:
            began = time()
            await talk.chain.wait(lambda: talk.chain.outputs(number, block) is not None, (number, block))
            return time() - began

        time = asyncio.get_running_loop().time
        first, second, third = [await talk.begin_step(StepLayout((6 + n, 4 + n), (1, 1)), 2) for n in range(3)]
        assert await wait(second, 2) < local_push_link.MAX_HOLD_S
        assert told() == [], "what is in front of the exit block is urgent anyway"
        assert await wait(third, 4) < local_push_link.MAX_HOLD_S
        assert told() == [third]
        assert await wait(second, BLOCKS) < local_push_link.MAX_HOLD_S
        assert told() in ([third], [third, second]), "the last part may have answered already"
        await wait(third, BLOCKS)
        asked = len(told())
        await wait(third, BLOCKS)
        await asyncio.sleep(1)
        assert len(told()) == asked
        urgent = await talk.begin_step(StepLayout((9, 7), (1, 1)))
        await wait(urgent, BLOCKS)
        assert len(told()) == asked
        for number in (first, second, third, urgent):
            talk.chain.settle(number)

    run(span_model, TWO, act)


def test_a_server_that_takes_over_is_told_which_step_is_waited_for(span_model):
    """a is lost while the client waits for steps that b would hold."""

    async def act(swarm, talk):
        begun = [await talk.begin_step(StepLayout((6 + n, 4 + n), (1, 1)), 2) for n in range(3)]
        waiting = asyncio.ensure_future(talk.chain.wait(lambda: False, (begun[-1], BLOCKS)))
        await asyncio.sleep(0.001)
        swarm.kill("a")
        async with asyncio.timeout(local_push_link.MAX_HOLD_S / 2):
            await waiting
        assert swarm.planner.routes[-1] == "0:2@b 2:4@b 4:6@b"
        heard = [message.last for _, message in swarm.servers["b"].heard if isinstance(message, messages.Expedite)]
        assert heard == [begun[-1]] * 2
        talk.chain.settle(begun[-1])

    run(span_model, TWO, act)


def test_steps_for_a_part_that_was_opened_anew_are_held_no_longer_than_the_client_wants(span_model):
    """The link from the part before was made for the session that the server has forgotten."""

    async def act(swarm, talk):
        session = find_session(swarm.servers["a"], talk, 1)
        session.client.close()
        swarm.servers["a"].sessions.close(session)
        await asyncio.sleep(0.1)
        await talk.chain.resume()
        begun = [await talk.begin_step(StepLayout((6 + n, 4 + n), (1, 1)), 2) for n in range(3)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(local_push_link.MAX_HOLD_S / 2):
            await talk.chain.wait(lambda: False, (begun[-1], BLOCKS))
        talk.chain.settle(begun[-1])

    run(span_model, TWO, act)


def test_only_what_lies_inside_a_span_is_cut(span_model):
    async def act(swarm, talk):
        assert swarm.planner.routes == ["0:2@a 2:3@b 3:6@b"]

    run(span_model, THREE, act, boundaries=(2, 3))


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize(
    ("servers", "lost", "span", "route"),
    [
        (TWO, "a", Span(0, 6), "0:2@b 2:4@b 4:6@b"),
        (THREE, "b", Span(2, 6), "0:2@a 2:4@b2 4:6@b2"),
    ],
)
def test_a_lost_server_is_replaced_as_a_whole_and_reported_once(span_model, servers, lost, span, route, push):
    async def act(swarm, talk):
        routes = count(swarm, RouteTaken)
        swarm.kill(lost)
        await talk.append(1, 1)
        assert failed(swarm) == [(lost, PeerLost)]
        assert [event for event in swarm.events if isinstance(event, HopLost)] == [HopLost(lost, span, "peer_lost")]
        assert (count(swarm, RouteTaken), count(swarm, Recovered)) == (routes + 1, 1)
        assert swarm.planner.routes[-1] == route

    run(span_model, servers, act, push=push)


@pytest.mark.parametrize("push", [True, False])
def test_a_lost_server_may_be_replaced_by_several(span_model, push):
    async def act(swarm, talk):
        await swarm.add("c", 0, 3)
        await swarm.add("d", 3, 6)
        await swarm.planner.refresh()
        swarm.kill("a")
        await talk.append(1, 1)
        assert swarm.planner.routes[-1] == "0:2@c 2:3@c 3:4@d 4:6@d"
        swarm.kill("c")
        swarm.kill("d")
        await swarm.add("e", 0, 6)
        await swarm.planner.refresh()
        await talk.step(StepLayout((4, 4), (1, 1), (1, 1)))
        assert failed(swarm) == [("a", PeerLost), ("c", PeerLost), ("d", PeerLost)]

    run(span_model, {"a": (0, 6)}, act, push=push)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_whose_stream_alone_broke_is_opened_again_and_nothing_is_replayed(span_model, part):
    async def act(swarm, talk):
        server = swarm.servers["a"]
        find_session(server, talk, part).client.close()
        await asyncio.sleep(0.1)
        await talk.append(1, 1)
        assert failed(swarm) == []
        assert server.count(messages.OpenSession) == 4
        assert server.count(messages.ReplayRequest) == 0

    run(span_model, TWO, act)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_was_forgotten_is_filled_again_alone(span_model, part):
    async def act(swarm, talk):
        server = swarm.servers["a"]
        server.sessions.close(find_session(server, talk, part))
        await talk.append(1, 1)
        assert failed(swarm) == []
        assert server.count(messages.ReplayRequest) == 1

    run(span_model, TWO, act)


def find_session(server: Server, talk: Conversation, part: int) -> Any:
    """The session at a server that belongs to one hop of the chain."""
    return server.sessions._sessions[CLIENT, talk.chain._hops[part].session_id]


@pytest.mark.parametrize("amid", [True, False])
def test_a_server_that_leaves_is_left_once(span_model, amid):
    async def act(swarm, talk):
        server = swarm.servers["a"]
        server.handler.closing = True
        if amid:
            step = asyncio.ensure_future(talk.append(1, 1))
            await asyncio.sleep(0.02)
            await server.handler.hand_over()
            await step
        else:
            await server.handler.hand_over()
            await asyncio.sleep(1)
        await talk.append(1, 1)
        await asyncio.sleep(1)
        assert failed(swarm) == [("a", ServerClosing)]
        assert count(swarm, HopLost) == 1
        assert swarm.planner.routes[-1] == "0:2@b 2:4@b 4:6@b"
        assert len(server.sessions) == 0

    run(span_model, TWO, act)


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("boundaries", [(), (3,), (1, 2, 3, 4, 5)])
def test_a_server_that_leaves_ends_the_step_that_it_has_begun_in_all_its_parts(span_model, boundaries, push):
    async def act(swarm, talk):
        leaving, other = swarm.servers["a"], swarm.servers["b"]
        leaving.handler.closing = True
        step = asyncio.ensure_future(talk.append(1, 1))
        await asyncio.sleep(0.1)
        await leaving.handler.hand_over()
        await step
        assert other.heard == []
        assert failed(swarm) == []
        await talk.append(1, 1)
        assert failed(swarm) == [("a", ServerClosing)]
        assert other.count(messages.OpenSession) == len(boundaries) + 1

    run(span_model, TWO, act, boundaries, seconds=0.5, push=push, alternatives=False)


def test_a_server_that_cannot_be_opened_is_reported_once(span_model):
    async def scenario() -> None:
        swarm = Swarm(span_model, TWO)
        await swarm.start()
        refusal = messages.refusal(CacheFull("no room"))

        def refuse(message: Any, payload: Any) -> Any:
            return (refusal, b"") if isinstance(message, messages.SessionOpened) else (message, payload)

        swarm.servers["a"].tamper = refuse
        talk = await swarm.chain(boundaries=CUTS)
        assert failed(swarm) == [("a", CacheFull)]
        assert swarm.planner.routes == ["0:2@b 2:4@b 4:6@b"]
        await talk.append(2)
        await asyncio.sleep(1)
        assert len(swarm.servers["a"].sessions) == 0

    virtual_time.run(scenario)


@pytest.mark.parametrize("how", ["resume", "another step"])
def test_a_session_without_servers_waits_reports_once_and_goes_on(span_model, how):
    async def act(swarm, talk):
        swarm.kill("a")
        for _ in range(2):
            with pytest.raises(MissingBlocks, match="blocks 0:6 are missing"):
                await talk.append(1, 1)
        assert failed(swarm) == [("a", PeerLost)]
        await asyncio.sleep(30)  # the ban of the lost server is over by now
        await swarm.add("a", 0, 6)
        if how == "resume":
            await talk.chain.resume()
            assert swarm.planner.routes[-1] == "0:2@a 2:4@a 4:6@a"
            await talk.chain.resume()  # nothing to do
        await talk.append(1, 1)
        assert count(swarm, HopLost) == 1

    run(span_model, {"a": (0, 6)}, act, missing_blocks_timeout=5)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_server_is_lost_while_its_parts_are_at_different_steps(span_model, part):
    """Answers of one part do not arrive; what the others have answered meanwhile has to be computed once more."""

    async def act(swarm, talk):
        swarm.planner.has_alternatives = False
        find_session(swarm.servers["a"], talk, part).client.send = say_nothing
        step = asyncio.ensure_future(talk.append(1, 1))
        await asyncio.sleep(0.5)
        assert len({hop.progress.replied for hop in talk.chain._hops}) == 2
        swarm.kill("a")
        await step
        await talk.append(1, 1)
        assert [peer for peer, _ in failed(swarm)] == ["a"]

    async def say_nothing(message: Any, payload: Any = b"") -> None: ...

    run(span_model, TWO, act)


def test_a_part_that_a_replay_has_filled_further_than_the_next_one_is(span_model):
    """y's answers for its second part are lost; then x is replaced, by p and by y, and y dies. The record of what went
    into y's new part begins behind what its old part has answered, so that the two cannot be replaced at once."""

    async def act(swarm, talk):
        assert swarm.planner.routes[-1] == "0:4@x 4:6@y"
        swarm.planner.has_alternatives = False
        swarm.on_message = lambda source, target, message: isinstance(message, messages.StepReply) and source == "y"
        step = asyncio.ensure_future(talk.append(1, 1))
        await asyncio.sleep(0.1)
        swarm.kill("x")
        await asyncio.sleep(0.5)
        assert swarm.planner.routes[-1] == "0:2@p 2:4@y 4:6@y"
        swarm.kill("y")
        swarm.on_message = lambda source, target, message: False
        await step
        assert swarm.planner.routes[-2:] == ["0:2@p 2:4@z 4:6@y", "0:2@p 2:4@z 4:6@z"]
        assert [peer for peer, _ in failed(swarm)] == ["x", "y"]
        assert count(swarm, HopLost) == 2

    servers = {"x": (0, 4), "y": (2, 6), "p": (0, 2), "z": (2, 6)}
    run(span_model, servers, act, boundaries=())


def test_a_step_that_is_not_settled_is_computed_once_more_if_a_server_is_lost(span_model):
    """It has set rows back, and all servers have answered it."""

    async def act(swarm, talk):
        await talk.begin_step(StepLayout((6, 4), (1, 1)))
        number = await talk.begin_step(StepLayout((2, 3), (1, 1)))
        await talk.chain.wait(lambda: False)
        talk.chain.settle(number - 1)
        swarm.kill("a")
        await asyncio.sleep(0.1)
        await talk.chain.resume()
        number = await talk.begin_step(layout := StepLayout((3, 4), (1, 1)))
        await talk.chain.wait(lambda: talk.chain.outputs(number, BLOCKS) is not None)
        talk.check(layout, talk.chain.outputs(number, BLOCKS))
        talk.chain.settle(number)

    run(span_model, TWO, act)


def test_a_replay_that_went_beyond_what_is_settled_is_not_taken_back(span_model):
    """x is replaced by p and q after steps that are answered and not settled; then the first is settled, and q dies.
    The record of what went into q begins behind all of them."""

    async def act(swarm, talk):
        assert swarm.planner.routes[-1] == "0:4@x 4:6@c"
        begun = [await talk.begin_step(StepLayout((6 + n, 4 + n), (1, 1))) for n in range(3)]
        await talk.chain.wait(lambda: False)
        swarm.kill("x")
        await asyncio.sleep(0.1)
        await talk.chain.resume()
        assert swarm.planner.routes[-1] == "0:2@p 2:4@q 4:6@c"
        talk.chain.settle(begun[0])
        swarm.kill("q")
        await asyncio.sleep(0.1)
        await talk.chain.resume()
        number = await talk.begin_step(layout := StepLayout((9, 7), (1, 1)))
        await talk.chain.wait(lambda: talk.chain.outputs(number, BLOCKS) is not None)
        talk.check(layout, talk.chain.outputs(number, BLOCKS))
        talk.chain.settle(number)
        assert swarm.planner.routes[-1] == "0:2@p 2:4@z 4:6@c"

    servers = {"x": (0, 4), "c": (4, 6), "p": (0, 2), "q": (2, 4), "z": (2, 4)}
    run(span_model, servers, act, boundaries=())


def test_a_part_that_a_replay_has_filled_further_than_the_next_one_is_begins_again_alone(span_model):
    """c's answers are lost, x is replaced by p and q, and p pushes something else to q than it shows."""

    async def act(swarm, talk):
        assert swarm.planner.routes[-1] == "0:3@x 3:5@c 5:6@d"
        swarm.on_message = lambda source, target, message: (
            isinstance(message, messages.StepReply) and source == "c" and not swarm.planner.distrusted
        )
        await talk.append(1, 1)
        swarm.kill("x")
        await asyncio.sleep(0.1)
        await talk.chain.resume()
        assert swarm.planner.routes[-1] == "0:1@p 1:3@q 3:5@c 5:6@d"
        swarm.servers["p"].tamper = push_something_else
        await talk.append(1, 1)
        assert swarm.planner.distrusted == [("p", "q")]
        assert [peer for peer, _ in failed(swarm)] == ["x"]

    def push_something_else(message: Any, payload: Any) -> Any:
        is_push = isinstance(message, messages.PushRequest)
        return message, bytes(len(payload)) if is_push else payload

    servers = {"x": (0, 3), "c": (3, 5), "d": (5, 6), "p": (0, 1), "q": (1, 3)}
    run(span_model, servers, act, boundaries=())


def run_ahead(
    span_model: Any,
    servers: dict[str, tuple[int, int]],
    act: Callable[[Swarm, Conversation], None],
    boundaries: tuple[int, ...],
    count: int = 6,
) -> tuple[Swarm, list[float]]:
    """Steps that wait in front of the last part, which is busy, while `act` disturbs the session; the swarm, and when
    the steps are answered, in seconds from then on."""
    answered: list[float] = []
    swarm = Swarm(span_model, servers)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        await swarm.start()
        talk = await swarm.chain(boundaries=boundaries)
        await talk.append(3)
        busy = find_session(swarm.servers[talk.chain._hops[-1].peer_id], talk, -1)
        await busy.lock.acquire()
        begun = []
        for position in range(3, 3 + count):
            layout = StepLayout((position,), (1,))
            begun.append((await talk.begin_step(layout), layout, list(talk.histories)))
            await asyncio.sleep(0.05)
        began = loop.time()
        act(swarm, talk)
        loop.call_later(0.3, busy.lock.release)
        for number, layout, histories in begun:
            await talk.chain.wait(lambda number=number: talk.chain.outputs(number, BLOCKS) is not None)
            talk.check(layout, talk.chain.outputs(number, BLOCKS), histories)
            answered.append(loop.time() - began)
            talk.chain.settle(number)
        await talk.chain.close()

    virtual_time.run(scenario)
    return swarm, answered


def test_steps_that_wait_at_a_later_part_are_not_lost_with_a_server_in_front_of_it(span_model):
    servers = {"a": (0, 2), "b": (2, 6), "a2": (0, 2)}
    swarm, answered = run_ahead(span_model, servers, lambda swarm, talk: swarm.kill("a"), (4,))
    assert failed(swarm) == [("a", PeerLost)]
    assert swarm.planner.routes[-1] == "0:2@a2 2:4@b 4:6@b"
    assert max(answered) < 1  # and not after a timeout
    assert swarm.servers["b"].count(messages.ReplayRequest) == 0


def test_steps_that_a_link_has_lost_cost_one_timeout_in_all(span_model):
    def lose(swarm: Swarm, talk: Conversation) -> None:
        find_session(swarm.servers["a"], talk, 0).close_push_link()

    swarm, answered = run_ahead(span_model, {"a": (0, 6)}, lose, (4,))
    assert failed(swarm) == []
    lost = answered[1:]  # the first one had begun
    assert max(lost) - min(lost) < 1


@pytest.mark.parametrize("bound", ["steps", "bytes"])
def test_a_client_that_runs_ahead_of_a_full_link_loses_nothing(span_model, monkeypatch, bound):
    if bound == "steps":
        monkeypatch.setattr(local_push_link, "MAX_WAITING_STEPS", 3)
    else:
        monkeypatch.setattr(local_push_link, "MAX_WAITING_BYTES", 1)
    swarm, answered = run_ahead(span_model, {"a": (0, 6)}, lambda swarm, talk: None, (3,), count=8)
    assert failed(swarm) == []
    assert max(answered) < 1
    assert swarm.servers["a"].count(messages.ReplayRequest) == 0
