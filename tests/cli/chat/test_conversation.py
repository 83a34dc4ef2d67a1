"""Commands and messages, and what the model receives."""

from __future__ import annotations

import pytest

from swarm.cli.chat.conversation import (
    COMMANDS,
    Conversation,
    ConversationMessage,
    InvalidCommand,
    parse_command,
    parse_message,
)


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
