"""Counting the exits of an answer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit.token_output import ProvisionalStreamer
from swarm.client.routes.events import ExitTaken, ExitVerified
from swarm.generation.sequence_generation import ExitCounts, ProvisionalText


def counted(*events: ExitTaken | ExitVerified) -> ExitCounts:
    counts = ExitCounts()
    for event in events:
        counts.count(event)
    return counts


def test_exits_are_counted_by_boundary():
    counts = counted(ExitTaken(8), ExitTaken(4), ExitTaken(4), ExitVerified(4, True), ExitVerified(8, False))
    assert counts.details() == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 8, "taken": 1, "stood": 0, "given_up": 1},
    ]
    assert ExitCounts().details() == []


def test_the_sequences_of_a_request_are_added_up():
    first, second = counted(ExitTaken(4), ExitVerified(4, True)), counted(ExitTaken(4), ExitTaken(6))
    assert ExitCounts.total([first, second, ExitCounts()]).details() == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 6, "taken": 1, "stood": 0, "given_up": 0},
    ]
    assert first.details() == [{"block": 4, "taken": 1, "stood": 1, "given_up": 0}]


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
