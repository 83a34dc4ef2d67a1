"""The sequences of a request together."""

from __future__ import annotations

import asyncio

import pytest

from swarm.client.routes.events import BlocksMissing
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import (
    SequenceDelta,
    SequenceEnd,
    SequenceProvisional,
)
from swarm.generation.sequence_group import merge_deltas
from tests.generation.fake_generation import make_group

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
