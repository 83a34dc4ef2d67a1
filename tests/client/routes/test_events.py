"""What listeners hear of a session, and what they cannot harm."""

from __future__ import annotations

import asyncio

import pytest

from swarm.client.routes.events import (
    BlocksMissing,
    HopLost,
    PromptComputed,
    Recovered,
    Replayed,
    RouteTaken,
    broadcast,
)
from swarm.data_structures import Span
from swarm.errors import MissingBlocks
from tests import virtual_time
from tests.client.chains import Swarm

TWICE = {"a": (0, 2), "b": (2, 4), "c": (4, 6), "b2": (2, 4)}


def names(event: RouteTaken) -> list[str]:
    return [hop.server.peer_id for hop in event.route.hops]


def test_events_of_a_failover_come_in_order(span_model):
    async def scenario() -> None:
        swarm = Swarm(span_model, TWICE)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(3, 5)
        (taken,) = swarm.events
        assert names(taken) == ["a", "b", "c"]
        swarm.kill("b")
        await talk.append(1, 1)
        lost, replayed, recovered, again = swarm.events[1:]
        assert lost == HopLost("b", Span(2, 4), "peer_lost")
        assert replayed == Replayed(Span(2, 4), 8)
        assert isinstance(recovered, Recovered)
        assert 0 < recovered.seconds < 1
        assert names(again) == ["a", "b2", "c"]

    virtual_time.run(scenario)


def test_each_chunk_of_a_prompt_is_an_event(span_model):
    async def scenario() -> None:
        swarm = Swarm(span_model, {"a": (0, 2), "b": (2, 6)})
        await swarm.start()
        talk = await swarm.chain()
        await talk.prefill((3, 5), (4, 2), (1, 1))
        await talk.append(1, 1)
        assert swarm.events[1:] == [PromptComputed(5), PromptComputed(7), PromptComputed(8)]

    virtual_time.run(scenario)


def test_waiting_for_blocks_is_one_event(span_model):
    async def scenario() -> None:
        swarm = Swarm(span_model, {"a": (0, 2), "b": (2, 6)}, missing_blocks_timeout=10.0)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(1)
        swarm.kill("b")
        del swarm.announced["b"]
        with pytest.raises(MissingBlocks):
            await talk.append(1)
        assert [event for event in swarm.events if isinstance(event, BlocksMissing)] == [BlocksMissing((2, 3, 4, 5))]
        await asyncio.sleep(0)

    virtual_time.run(scenario)


def test_a_listener_that_fails_does_not_disturb_others(caplog):
    heard = []

    def broken(event):
        raise ZeroDivisionError

    broadcast([broken, heard.append])(Recovered(1.0))
    assert heard == [Recovered(1.0)]
    assert "an event listener failed on Recovered" in caplog.text
