"""Provisional text of one sequence."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit.token_output import ProvisionalStreamer
from swarm.generation.provisional_text import ProvisionalText


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


@given(st.lists(st.tuples(st.sampled_from(["show", "stand", "back"]), st.integers(1, 9)), max_size=30))
def test_a_reader_always_has_the_newest(moves):
    """A reader drops provisional text with every token that stands, as with a chunk of the answer."""
    screen, tokens = "", []

    def show(text: str) -> None:
        nonlocal screen
        screen = text

    output = ProvisionalText(letters, show)
    assert isinstance(output, ProvisionalStreamer)
    output.put(torch.tensor([[1, 2, 3]]))
    for move, number in moves:
        if move == "show":
            tokens.append(number)
            output.put_provisional(torch.tensor([number]))
        elif move == "stand":
            screen = ""
            token = tokens.pop(0) if tokens else number
            output.put(torch.tensor([token]))
        elif len(tokens) >= number:
            del tokens[-number:]
            output.take_back(number)
        assert screen == letters(tokens)
    output.end()


def test_what_is_no_text_yet_is_not_told_of():
    shown: list[str] = []
    output = ProvisionalText(lambda tokens: "é" if len(tokens) == 2 else "", shown.append)
    for token in (1, 2):
        output.put_provisional(torch.tensor([token]))
    output.take_back(1)
    assert shown == ["é", ""]
