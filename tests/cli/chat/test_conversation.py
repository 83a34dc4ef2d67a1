"""Lines of a conversation, and pieces of an answer: their form is validated, and none controls the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli.chat.conversation import (
    COMMANDS,
    ChatFailed,
    Conversation,
    ConversationMessage,
    InvalidCommand,
    NoticePiece,
    RoutePiece,
    SummaryPiece,
    TextPiece,
    parse_command,
    parse_message,
    read_chunk,
    read_detail,
    strip_controls,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def chunk(content: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


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


@given(JSON)
def test_any_json_is_read_or_rejected(body):
    for read in (read_chunk, read_detail):
        try:
            piece = read(body)
        except ChatFailed:
            continue
        assert piece is None or isinstance(piece, TextPiece | RoutePiece | NoticePiece | SummaryPiece)


def test_chunks():
    assert read_chunk(chunk("hi")) == TextPiece("hi")
    assert read_chunk(chunk("\x1b]0;title\x07hi")) == TextPiece("]0;titlehi")
    assert read_chunk(chunk(None)) is None
    assert read_chunk({"choices": [], "usage": {}}) is None
    with pytest.raises(ChatFailed, match="invalid part of an answer"):
        read_chunk([1])
    with pytest.raises(ChatFailed, match="nobody holds blocks 4:8"):
        read_chunk({"error": {"message": "nobody holds\x1b blocks 4:8", "type": "server_error"}})


def test_details():
    hop = {"blocks": "0:4", "peer": "…ab12cd", "name": "ann's\x1b[2J " + "x" * 100}
    route = read_detail({"kind": "route", "hops": [hop, {"blocks": "4:8", "peer": "…ef34ab"}]})
    assert route == RoutePiece(("0:4 …ab12cd (ann's[2J " + "x" * 31 + ")", "4:8 …ef34ab"))
    assert read_detail({"kind": "lost", "peer": "…ab12cd", "blocks": "4:8", "reason": "peer_lost"}) == NoticePiece(
        "…ab12cd with blocks 4:8 failed; looking for another server"
    )
    assert read_detail({"kind": "missing", "blocks": "4:8"}) == NoticePiece(
        "no server holds blocks 4:8; waiting for one"
    )
    assert read_detail({"kind": "recovered", "seconds": 0.07}) == NoticePiece("continuing after 0.1 s")
    assert read_detail({"kind": "done", "tokens": 3, "seconds": 1.5, "first_token_seconds": 0.1}) == SummaryPiece(
        3, 1.5, None
    )
    assert read_detail({"kind": "of tomorrow"}) is None
    with pytest.raises(ChatFailed, match="invalid detail"):
        read_detail({"kind": "route", "hops": 7})


def roles(conversation: Conversation) -> str:
    return "".join(message.role[0] for message in conversation.messages)


def test_messages():
    conversation = Conversation("Be brief.").with_question("Hi").with_answer("Hello").with_question("Bye")
    assert conversation.messages == (
        ConversationMessage("system", "Be brief."),
        ConversationMessage("user", "Hi"),
        ConversationMessage("assistant", "Hello"),
        ConversationMessage("user", "Bye"),
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
