"""Batches without a session: how they are divided into micro-batches, and what happens when servers fail."""

from __future__ import annotations

import asyncio
import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.client.batches.passes import split_into_micro_batches
from swarm.client.chain.prompt_chunks import MAX_CHUNK_TOKENS
from swarm.data_structures import ServerInfo
from swarm.errors import AdapterRefused, MemoryFull, MissingBlocks, NotFiniteOutputs, SuspectOutputs, TooLong
from swarm.protocol import messages
from tests import virtual_time
from tests.client.batches.test_backward_pass import SERVERS, Batch
from tests.client.chains import CLIENT, Swarm
from tests.infos import server_info


def play(span_model: Any, act: Any, **options: Any) -> None:
    async def scenario() -> None:
        swarm = Swarm(span_model, SERVERS, **options)
        await swarm.start()
        await act(swarm, Batch(swarm, {}))
        await asyncio.sleep(1)
        assert all(server.sessions.free == server.sessions.capacity for server in swarm.servers.values())

    virtual_time.run(scenario)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_micro_batches_run_at_once_and_return_in_order(span_model):
    async def act(swarm, batch):
        batch.add((5,), "a", "b")
        batch.add((3,), "a2", "b2")
        batch.add((2,), "a2", "b")
        await batch.compute()
        assert now() == pytest.approx(2 * (4 * 0.01 + 0.5))  # connecting is a round trip, too
        assert [server.count(messages.ForwardRequest) for server in swarm.servers.values()] == [1, 2, 2, 1]

    play(span_model, act, seconds=0.5)


@pytest.mark.parametrize("fault", ["kill", "hang", "nan"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_server_that_fails_is_replaced_from_its_first_block_on(span_model, name, fault):
    async def act(swarm, batch):
        if fault == "kill":
            swarm.kill(name)
        elif fault == "hang":
            swarm.hub.hang(name)
        else:
            swarm.servers[name].tamper = lambda message, payload: (message, b"\xff" * len(payload))
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b2")
        await batch.compute()
        assert [peer for peer, _ in swarm.planner.failures] == [name]
        others = {other: server.count(messages.ForwardRequest) for other, server in swarm.servers.items()}
        others.pop(name)
        assert others == {other: 2 if other == name + "2" else 1 for other in others}

    play(span_model, act)


@pytest.mark.parametrize("replacement", [True, False], ids=["another one", "no other one"])
def test_a_server_from_whose_outputs_others_compute_nan_is_replaced(span_model, replacement):
    """Outputs that are huge, and finite, are no violation that a client sees."""

    async def act(swarm, batch):
        poisoned = []

        def poison(message, payload):
            poisoned.append(message)
            return message, payload

        def suffer(message, payload):
            return message, b"\xff" * len(payload) if poisoned else payload

        def heal(message, payload):
            poisoned.clear()
            return message, payload

        swarm.servers["a"].tamper = poison
        swarm.servers["a2"].tamper = heal
        if not replacement:
            swarm.kill("a2")
            del swarm.announced["a2"]
        for name in ("b", "b2"):
            swarm.servers[name].tamper = suffer
        batch.add((5,), "a", "b")
        if replacement:
            await batch.compute()
            assert [(peer, type(error)) for peer, error in swarm.planner.failures] == [("a", SuspectOutputs)]
        else:
            with pytest.raises(NotFiniteOutputs, match="computed NaN or infinity in float32"):
                await batch.compute()
            assert swarm.planner.failures == []
        assert [swarm.servers[name].count(messages.ForwardRequest) for name in ("b", "b2")] == [1 + replacement, 1]

    play(span_model, act)


def test_inputs_from_which_all_servers_compute_nan_are_not_retried_forever(span_model):
    async def act(swarm, batch):
        for server in swarm.servers.values():
            server.tamper = lambda message, payload: (message, b"\xff" * len(payload))
        batch.add((5,), "a", "b")
        with pytest.raises(NotFiniteOutputs, match="computed NaN or infinity in float32"):
            await batch.compute()
        assert swarm.planner.failures == []
        assert sum(server.count(messages.ForwardRequest) for server in swarm.servers.values()) == 2

    play(span_model, act)


def test_a_replacement_may_have_another_span(span_model):
    async def act(swarm, batch):
        swarm.kill("b")
        swarm.kill("b2")
        await swarm.add("c", 2, 5)
        await swarm.add("d", 4, 6)
        batch.add((5,), "a", "b")
        await batch.compute()
        assert swarm.servers["a"].count(messages.ForwardRequest) == 1

    play(span_model, act)


def test_a_slow_server_is_waited_for_once(span_model):
    """Neither the portion that met it nor another one that was to meet it later."""

    async def act(swarm, batch):
        swarm.servers["b"].runtime._seconds = 1000.0
        swarm.servers["a2"].runtime._seconds = 5.0
        swarm.announced["a2"] = replace(swarm.announced["a2"], throughput=1.0)
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b")
        await batch.compute()
        assert swarm.servers["b"].count(messages.ForwardRequest) == 1
        assert [peer for peer, _ in swarm.planner.failures] == ["b"]
        assert now() < 10

    play(span_model, act)


def test_missing_blocks_are_named(span_model):
    async def act(swarm, batch):
        swarm.kill("b")
        swarm.kill("b2")
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b2")
        with pytest.raises(MissingBlocks, match="blocks 3:6"):
            await batch.compute()

    play(span_model, act, missing_blocks_timeout=60.0)


def test_an_agreed_refusal_is_raised_and_cancels_the_rest(span_model):
    async def act(swarm, batch):
        swarm.servers["b2"].runtime._seconds = 2.0
        refused = messages.refusal(TooLong("too long"))
        for name in ("a", "a2"):
            swarm.servers[name].tamper = lambda message, payload: (refused, b"")
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b2")
        with pytest.raises(TooLong, match=re.escape("(blocks 0:3) refused: too long")):
            await batch.compute()
        assert now() < 1
        assert swarm.planner.failures == []
        await asyncio.sleep(3)
        assert not swarm.hub.tasks

    play(span_model, act)


def test_a_refusal_by_one_server_alone_is_computed_by_another(span_model):
    error = AdapterRefused("too large")

    async def act(swarm, batch):
        swarm.servers["a"].tamper = lambda message, payload: (messages.refusal(error), b"")
        batch.add((5,), "a", "b")
        batch.add((4,), "a", "b")
        await batch.compute()
        assert {(peer, type(error)) for peer, error in swarm.planner.failures} == {("a", type(error))}

    play(span_model, act)


@pytest.mark.parametrize("others", [True, False], ids=["others can", "nobody can"])
def test_a_server_whose_memory_is_too_small_is_left_for_another_one(span_model, others):
    async def act(swarm, batch):
        batch.add((5,), "a", "b")
        for name in ["a"] if others else ["a", "a2"]:
            swarm.servers[name].tamper = lambda message, payload: (messages.refusal(MemoryFull("half of it")), b"")
        with nullcontext() if others else pytest.raises(MemoryFull, match="half of it"):
            await batch.compute()

    play(span_model, act, missing_blocks_timeout=0.0)


def test_an_interrupted_batch_leaves_nothing_behind(span_model):
    async def act(swarm, batch):
        sent = []
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b2")
        work = asyncio.ensure_future(batch.compute())
        await asyncio.sleep(0.035)
        work.cancel()
        await asyncio.wait({work})
        swarm.on_message = lambda source, target, message: source == CLIENT and sent.append(message) is not None
        await asyncio.sleep(5)
        assert sent == []
        assert not swarm.hub.tasks

    play(span_model, act)


def servers(hops: int, forward: float = 0.0, network: float = 0.0) -> list[ServerInfo]:
    return [
        server_info(n, n + 1, throughput=100.0, forward_throughput=forward, network_throughput=network)
        for n in range(hops)
    ]


def test_examples():
    for counts, hops, sizes in [
        ([], 3, []),
        ([5], 3, [1]),
        ([64] * 8, 1, [8]),
        ([64] * 8, 3, [1] * 8),
        ([64] * 32, 3, [2] * 16),
        ([8] * 8, 3, [4, 4]),
        ([2048] * 2, 1, [1, 1]),
        ([1, 1, 500, 500, 1, 1], 2, [2, 1, 1, 2]),
    ]:
        assert [len(rows) for rows in split_into_micro_batches(counts, servers(hops))] == sizes


def test_slow_links_for_gradients_mean_fewer_micro_batches():
    counts = [64] * 8
    alone = split_into_micro_batches(counts, servers(3, 1000.0, 1000.0))
    assert len(split_into_micro_batches(counts, servers(3, 1000.0, 1000.0), 100.0)) < len(alone)
    assert len(split_into_micro_batches(counts, servers(3, 1000.0, 1e6), 100.0)) == len(alone)
    assert len(split_into_micro_batches(counts, servers(3), 100.0)) == 8  # nothing is known of the links


@example([1], 2, 1.0, 2.3e-309, 0.0)  # a link so slow that its price is no number any more
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=60),
    st.integers(1, 8),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 1e4),
)
def test_micro_batches_hold_every_sequence_once_and_are_about_equal(counts, hops, forward, network, gradients):
    groups = split_into_micro_batches(counts, servers(hops, forward, network), gradients)
    assert list(itertools.chain(*groups)) == list(range(len(counts)))
    assert all(groups)
    for group in groups:
        assert sum(counts[row] for row in group) < MAX_CHUNK_TOKENS + max(counts)
