"""The sequences of a request together."""

from __future__ import annotations

import asyncio

import pytest

from swarm.client.routes.events import BlocksMissing, HopLost, PeerAvoided, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.generation.errors import GenerationCrashed
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import SequenceEnd, SequenceProvisional
from swarm.generation.sequence_group import MAX_PARALLEL, MIN_SHARED_TOKENS, merge_deltas, route_detail
from swarm.generation.sequence_output import SequenceDelta
from tests.generation.fake_generation import make_group
from tests.infos import server_info

__all__ = ["make_group"]


def test_consecutive_deltas_are_merged():
    call = ToolCall("f", "{}")
    waiting = [
        (0, SequenceDelta("a", (), (SampledToken(1),))),
        (0, SequenceDelta("b", (call,), (SampledToken(2),))),
        (1, SequenceDelta("x")),
        (0, SequenceDelta("c")),
        (0, SequenceEnd("stop", 3)),
    ]
    assert merge_deltas(waiting) == [
        (0, SequenceDelta("ab", (call,), (SampledToken(1), SampledToken(2)))),
        (1, SequenceDelta("x")),
        (0, SequenceDelta("c")),
        (0, SequenceEnd("stop", 3)),
    ]


def test_provisional_texts_that_later_output_replaces_are_left_out():
    waiting = [
        (0, SequenceDelta("a")),
        (0, SequenceProvisional("bc")),
        (1, SequenceProvisional("x")),
        (0, SequenceDelta("b")),
        (0, SequenceProvisional("c")),
        (0, SequenceProvisional("cd")),
        (0, BlocksMissing(())),
        (2, SequenceProvisional("y")),
        (2, SequenceEnd("stop", 3)),
    ]
    assert merge_deltas(waiting) == [
        (0, SequenceDelta("a")),
        (1, SequenceProvisional("x")),
        (0, SequenceDelta("b")),
        (0, SequenceProvisional("cd")),
        (0, BlocksMissing(())),
        (2, SequenceEnd("stop", 3)),
    ]


def test_provisional_texts_do_not_keep_deltas_apart():
    texts = [(0, one) for text in "abc" for one in (SequenceDelta(text), SequenceProvisional("next"))]
    assert merge_deltas(texts) == [(0, SequenceDelta("abc")), (0, SequenceProvisional("next"))]


def test_if_threads_run_out_the_started_sequences_are_ended(make_group):
    async def work() -> None:
        one = make_group(1, 2, 0, 3)
        with pytest.raises(RuntimeError, match="new thread"):
            async with one.generating():
                raise AssertionError
        assert not any(sequence.running for sequence in one._generations)

    asyncio.run(work())


def test_a_few_of_many_sequences_are_generated_at_once(make_group):
    """The next one starts as one is complete, and none once the request has ended."""

    async def work() -> None:
        group = make_group(*range(1, 21))
        generations = group._generations

        def running() -> list[int]:
            return [index for index, one in enumerate(generations) if one.running]

        assert group.parallel == MAX_PARALLEL == 8
        async with group.generating():
            assert running() == list(range(8))
            for index in (3, 5):
                generations[index].running = False
                generations[index].on_event(SequenceEnd("stop", 1))
            assert running() == [0, 1, 2, 4, 6, 7, 8, 9]
        assert running() == []
        generations[0].on_event(SequenceEnd("stop", 1))
        assert running() == []

    asyncio.run(work())


def test_a_sequence_that_cannot_be_started_later_ends_the_request(make_group):
    async def work() -> None:
        group = make_group(*[1] * 8, 0)
        async with group.generating():
            group._generations[0].on_event(SequenceEnd("stop", 1))
            with pytest.raises(GenerationCrashed):
                async for _ in group.events():
                    pass

    asyncio.run(work())


ROUTE = Route((Hop(server_info(0, 4, "abcdefgh", name="ann"), Span(0, 4)),))


def test_details():
    for event, told in [
        (RouteTaken(ROUTE), {"kind": "route", "hops": [{"blocks": "0:4", "peer": "…cdefgh", "name": "ann"}]}),
        (
            HopLost("abcdefgh", Span(0, 4), "peer_lost"),
            {"kind": "lost", "peer": "…cdefgh", "blocks": "0:4", "reason": "peer_lost"},
        ),
        (BlocksMissing((0, 1, 5)), {"kind": "missing", "blocks": "0:2, 5:6"}),
        (Recovered(0.06789), {"kind": "recovered", "seconds": 0.068}),
        (Replayed(Span(0, 4), 9), None),
        (PeerAvoided("a", "fault", 1.0), None),
        (SequenceDelta("a"), None),
    ]:
        assert route_detail(event) == told


@pytest.mark.parametrize("is_computed", [True, False])
def test_of_one_prompt_the_first_sequence_begins_alone(make_group, is_computed):
    """The others wait until it has computed the prompt, or has ended without."""

    async def scenario():
        long, prefix = [1] * MIN_SHARED_TOKENS, object()
        group = make_group(long, long, 7, long)
        first, second, other, last = group._generations
        async with group.generating():
            assert [one.running for one in group._generations] == [True, False, True, False]
            if is_computed:
                first.on_prompt(prefix)
                assert [one.running for one in group._generations] == [True, True, True, True]
            first.on_event(SequenceEnd("stop", 1))
            assert [one.running for one in (second, other, last)] == [True, True, True]
            assert [getattr(one, "prompt", None) for one in (second, other, last)] == [
                *(prefix if is_computed else None, None),
                prefix if is_computed else None,
            ]

    asyncio.run(scenario())
