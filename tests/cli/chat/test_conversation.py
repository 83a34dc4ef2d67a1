"""What a line means, and what a model is given."""

from __future__ import annotations

import pytest

from swarm.cli.chat.conversation import COMMANDS, Conversation, Message, NotPossible, command_of, message_of


def roles(conversation: Conversation) -> str:
    return "".join(message.role[0] for message in conversation.messages)


def test_messages():
    conversation = Conversation("Be brief.").asked("Hi").answered("Hello").asked("Bye")
    assert conversation.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello"),
        Message("user", "Bye"),
    )
    assert roles(Conversation().asked("Hi")) == "u"


def test_again_takes_the_last_answer_back():
    conversation = Conversation("x").asked("1").answered("2").asked("3")
    assert conversation.answered("4").again() == conversation
    assert conversation.again() == conversation
    with pytest.raises(NotPossible, match="nothing was asked yet"):
        Conversation("x").again()


def test_commands():
    assert command_of("/system Be  brief. ") == ("system", "Be  brief.")
    assert {command_of(f"/{name}") for name in COMMANDS} == {(name, "") for name in COMMANDS}
    assert command_of("hello /quit") is None
    assert command_of("//quit") is None
    assert message_of("//quit") == "/quit"
    assert message_of("1/2") == "1/2"
    with pytest.raises(NotPossible, match="there is no /quti; /help lists what there is"):
        command_of("/quti now")
