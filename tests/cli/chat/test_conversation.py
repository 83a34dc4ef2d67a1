"""Lines of a conversation, and pieces of an answer, none of which controls the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli.chat.conversation import (
    COMMANDS,
    Conversation,
    InvalidCommand,
    NoticePiece,
    ProgressPiece,
    RoutePiece,
    TextPiece,
    parse_command,
    parse_message,
    strip_controls,
)
from swarm.cli.chat.swarm_backend import piece_of
from swarm.client.routes.events import BlocksMissing, HopLost, Recovered, Replayed, RouteTaken
from swarm.data_structures import Hop, Route, Span
from swarm.generation.sequence_generation import PromptProgress, RoomAwaited
from swarm.generation.sequence_output import SequenceDelta
from tests.infos import server_info


def test_control_characters_are_stripped():
    for hostile, shown in [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]52;c;aGk=\x07", "]52;c;aGk="),
        ("\x9b2J\x90q\x9c", "2Jq"),
        ("a\rb\x08c\x7f", "abc"),
        ("\u202etxt.exe", "txt.exe"),
        ("\ud800", ""),
        ("über 日本 👩‍👩‍👧", "über 日本 👩‍👩‍👧"),
    ]:
        assert strip_controls(hostile) == shown


@given(st.text(st.characters(codec=None)))
def test_stripped_text_has_no_control_characters(text):
    assert all(one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cs") for one in strip_controls(text))
    assert strip_controls(strip_controls(text)) == strip_controls(text)


def test_what_is_shown_of_events():
    first, second = server_info(0, 4, "peer-ab12cd", name="ann's\x1b[2J " + "x" * 100), server_info(4, 8, "peer-ef34ab")
    route = Route((Hop(first, Span(0, 4)), Hop(second, Span(4, 8))))
    assert piece_of(RouteTaken(route)) == RoutePiece(
        (f"0:4 {first.short_id} (ann's[2J " + "x" * 31 + ")", f"4:8 {second.short_id}")
    )
    assert piece_of(HopLost("peer-ab12cd", Span(4, 8), "peer_lost")) == NoticePiece(
        "…ab12cd with blocks 4:8 failed; looking for another server"
    )
    assert piece_of(BlocksMissing((4, 5, 6, 7))) == NoticePiece("no server holds blocks 4:8; waiting for one")
    assert piece_of(Recovered(0.07)) == NoticePiece("continuing after 0.1 s")
    assert piece_of(RoomAwaited()) == NoticePiece("the servers are full; waiting for room")
    assert piece_of(PromptProgress(2048, 8000)) == ProgressPiece("reading the conversation: 2,048 of 8,000 tokens")
    assert piece_of(SequenceDelta("\x1b]0;title\x07hi")) == TextPiece("]0;titlehi")
    assert piece_of(SequenceDelta("")) is None
    assert piece_of(Replayed(Span(0, 4), 7)) is None


def roles(conversation: Conversation) -> str:
    return "".join(message["role"][0] for message in conversation.messages)


def test_messages():
    conversation = Conversation("Be brief.").with_question("Hi").with_answer("Hello").with_question("Bye")
    assert conversation.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    )
    assert roles(Conversation().with_question("Hi")) == "u"


def test_retry_removes_the_last_answer():
    conversation = Conversation("x").with_question("1").with_answer("2").with_question("3")
    assert conversation.with_answer("4").without_last_answer() == conversation
    assert conversation.without_last_answer() == conversation
    with pytest.raises(InvalidCommand, match="there is no question yet"):
        Conversation("x").without_last_answer()


def test_commands():
    assert parse_command("/system Be  brief. ") == ("system", "Be  brief.")
    assert {parse_command(f"/{name}") for name in COMMANDS} == {(name, "") for name in COMMANDS}
    assert parse_command("hello /quit") is None
    assert parse_command("//quit") is None
    assert parse_message("//quit") == "/quit"
    assert parse_message("1/2") == "1/2"
    with pytest.raises(InvalidCommand, match="there is no command /quti: /help lists all"):
        parse_command("/quti now")
