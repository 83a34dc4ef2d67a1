"""The sequences of a request together."""

from __future__ import annotations

import asyncio

import pytest

from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import (
    SequenceDelta,
    SequenceEnd,
    SequenceProvisional,
)
from swarm.generation.sequence_group import merge_deltas
from swarm.generation.tool_calls import ToolCall
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


def test_only_the_last_of_consecutive_provisional_texts_stays():
    waiting = [
        (0, SequenceProvisional("a")),
        (0, SequenceProvisional("ab")),
        (1, SequenceProvisional("x")),
        (0, SequenceProvisional("")),
        (0, SequenceDelta("a")),
        (0, SequenceProvisional("b")),
    ]
    assert merge_deltas(waiting) == waiting[1:]


def test_if_threads_run_out_the_started_sequences_are_ended(make_group):
    async def work() -> None:
        one = make_group(1, 2, 0, 3)
        with pytest.raises(RuntimeError, match="new thread"):
            async with one.generating():
                raise AssertionError
        assert not any(sequence.running for sequence in one._generations)

    asyncio.run(work())
