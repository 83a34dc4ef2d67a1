"""Responses in OpenAI's form, whole and in chunks."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.client.routes.events import BlocksMissing, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.gateway.openai.dialect import StreamEvent
from swarm.gateway.openai.response_writers import (
    AccumulatedAnswer,
    ChatResponseWriter,
    CompletionResponseWriter,
    complete_response,
    stream_response,
)
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import PromptProgress, SequenceEnd, SequenceFailed
from swarm.generation.sequence_group import Usage
from swarm.generation.sequence_output import SequenceDelta
from tests.generation.fake_generation import make_group
from tests.infos import server_info


class Letters:
    """A tokenizer whose tokens are letters. 0 is special, and 1 and 2 are written alike."""

    all_special_ids = [0]

    def decode(self, tokens, **_):
        return "".join(("<s>", "a", "a", "b", "cd")[token] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])


def reported(prompt, tokens, echo):
    answer = AccumulatedAnswer()
    answer.add_delta(SequenceDelta("", prompt=prompt))
    answer.add_delta(SequenceDelta("", tokens=tokens))
    writer = CompletionResponseWriter("m", Letters(), echo)
    (choice,) = writer.body([answer], Usage(0, 0, 0, 0, 0.0, None))["choices"]
    return choice["logprobs"]


def test_the_prompts_tokens_come_first_and_special_ones_have_no_place_in_the_text():
    found = reported(
        (SampledToken(0), SampledToken(4, -1.0, ((3, -0.5),)), SampledToken(3, -2.0)),
        (SampledToken(1, -0.1, ((1, -0.1),)), SampledToken(0, -3.0)),
        ["cdb"],
    )
    assert found == {
        "tokens": ["<s>", "cd", "b", "a", "<s>"],
        "token_logprobs": [None, -1.0, -2.0, -0.1, -3.0],
        "top_logprobs": [None, {"b": -0.5, "cd": -1.0}, {"b": -2.0}, {"a": -0.1}, {"<s>": -3.0}],
        "text_offset": [0, 0, 2, 3, 4],
    }


def test_of_tokens_with_the_same_text_the_likeliest_is_reported():
    found = reported((), (SampledToken(2, -3.0, ((1, -0.2), (3, -1.0))),), [])
    assert found["top_logprobs"] == [{"a": -0.2, "b": -1.0}]
    assert found["token_logprobs"] == [-3.0]


__all__ = ["make_group"]

ROUTE = Route((Hop(server_info(0, 4, "abcdefgh", name="ann"), Span(0, 4)),))


async def written(group, with_details):
    return [event async for event in stream_response(group, ChatResponseWriter("m", None), with_details)]


def test_a_response_does_not_begin_while_blocks_are_missing(make_group):
    async def work() -> None:
        one = make_group(1)
        (sequence,) = one._generations
        for news in (RouteTaken(ROUTE), BlocksMissing((1,)), SequenceFailed(MissingBlocks((1,)))):
            sequence.on_event(news)
        told: list[StreamEvent] = []

        async def read() -> None:
            async for event in stream_response(one, ChatResponseWriter("m", None), with_details=True):
                told.append(event)

        with pytest.raises(MissingBlocks):
            await read()
        assert [(event.name, event.body["kind"]) for event in told] == [("swarm", "route"), ("swarm", "missing")]

    asyncio.run(work())


@pytest.mark.parametrize("with_details", [True, False])
def test_details_are_told_to_those_who_ask(make_group, with_details):
    async def work() -> None:
        one = make_group(1)
        for news in (RouteTaken(ROUTE), PromptProgress(512, 8000), SequenceEnd("stop", 1)):
            one._generations[0].on_event(news)
        details = [event.body["kind"] for event in await written(one, with_details) if event.name == "swarm"]
        assert details == (["route", "prompt", "done"] if with_details else [])

    asyncio.run(work())


def test_an_empty_answer_still_begins(make_group):
    async def work() -> None:
        one = make_group(1)
        one._generations[0].on_event(SequenceEnd("stop", 1))
        deltas = [event.body["choices"][0]["delta"] for event in await written(one, with_details=False)]
        assert deltas == [{"role": "assistant", "content": ""}, {}]

    asyncio.run(work())


def test_a_complete_response_is_written_outside_of_the_event_loop(make_group, monkeypatch):
    threads = []
    monkeypatch.setattr(ChatResponseWriter, "body", lambda *_: threads.append(threading.current_thread()) or {})

    async def work() -> None:
        one = make_group(1)
        one._generations[0].on_event(SequenceEnd("stop", 1))
        await complete_response(one, ChatResponseWriter("m", None), with_details=False)

    asyncio.run(work())
    assert threads != [threading.current_thread()]
