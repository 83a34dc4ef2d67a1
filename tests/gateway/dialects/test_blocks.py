"""Answers as blocks, without a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.dialects.anthropic_messages import MessageWriter
from swarm.gateway.dialects.blocks import Block
from swarm.gateway.openai.dialect import StreamEvent
from swarm.gateway.openai.response_writers import AccumulatedAnswer
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import SequenceEnd
from swarm.generation.sequence_group import Usage
from swarm.generation.sequence_output import SequenceDelta

USAGE = Usage(5, 7, 0, 0, 1.0, 0.5)
CALL = ToolCall("f", '{"a":1}')
PIECES = st.one_of(
    st.text("ab \n", min_size=1, max_size=3).map(SequenceDelta),
    st.text("ab", min_size=1, max_size=3).map(lambda thought: SequenceDelta("", thought=thought)),
    st.just(SequenceDelta("", (CALL,))),
)


def written(deltas: list[SequenceDelta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events of a streamed answer, and the content of the whole."""
    writer, before, end = MessageWriter("m", 100), AccumulatedAnswer(), SequenceEnd("stop", 7)
    events = []
    for delta in deltas:
        events += writer.delta_events(0, delta, before)
        before.add_delta(delta)
    events += writer.end_events(0, end)
    content = writer.object(USAGE)["content"]
    return [dict(event.body) for event in events], [{**block, "id": ""} for block in content]


@given(st.lists(PIECES, max_size=6))
def test_how_an_answer_is_divided_into_pieces_changes_no_block(pieces):
    split = [
        part
        for piece in pieces
        for part in ([SequenceDelta(letter) for letter in piece.text] if piece.text else [piece])
    ]
    events, content = written(split)
    assert content == written(pieces)[1]
    assert content  # an answer has at least one block
    texts = [block["text"] for block in content if block["type"] == "text"]
    assert not any(text.isspace() for text in texts) or len(content) == 1
    opened = None
    for event in events:
        if event["type"] == "content_block_start":
            assert opened is None
            opened = event["index"]
        assert event["index"] == opened
        if event["type"] == "content_block_stop":
            opened = None
    assert opened is None
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == list(range(len(content)))


def test_the_tokens_of_blanks_in_front_of_a_text_belong_to_it():
    found: list[tuple[str, list[int]]] = []

    class Watched(MessageWriter):
        def block_delta(self, block: Block, more: str, tokens: Sequence[SampledToken]) -> Iterable[StreamEvent]:
            found.append((block.content, [one.token for one in tokens]))
            return super().block_delta(block, more, tokens)

    writer = Watched("m", 100)
    for number, text in enumerate(("\n", " ", "a")):
        list(writer.delta_events(0, SequenceDelta(text, tokens=(SampledToken(number),)), AccumulatedAnswer()))
    assert found == [("\n a", [0, 1, 2])]
    assert [block.content for block in writer.blocks] == ["\n a"]


def test_an_answer_that_is_not_streamed_has_one_text():
    answer = AccumulatedAnswer()
    for delta in (SequenceDelta("a"), SequenceDelta("", thought="t"), SequenceDelta(" \n", (CALL,))):
        answer.add_delta(delta)
    answer.end = SequenceEnd("tool_calls", 7)
    body = MessageWriter("m", 100).body([answer], USAGE)
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_off_has_no_arguments():
    answer = AccumulatedAnswer()
    answer.add_delta(SequenceDelta("", (ToolCall("f", '{"a":'),)))
    answer.end = SequenceEnd("length", 95)
    body = MessageWriter("m", 100).body([answer], Usage(5, 95, 0, 0, 1.0, 0.5))
    assert body["content"][0]["input"] == {}
    assert body["stop_reason"] == "model_context_window_exceeded"
