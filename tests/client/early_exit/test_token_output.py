"""Streamers that take provisional tokens, and others."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from swarm.client.early_exit.token_output import TokenOutput


class Calls(BaseStreamer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(("put", value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


class ProvisionalCalls(Calls):
    def put_provisional(self, value: torch.Tensor) -> None:
        self.calls.append(("provisional", value.tolist()))

    def take_back(self, count: int) -> None:
        self.calls.append(("take back", count))


def write(streamer: Calls | None) -> None:
    """Two tokens leave; the first stands, the second does not; then a third, and the text ends in front of it."""
    output = TokenOutput(streamer)
    output.put(torch.tensor([1, 1]))
    output.put_provisional(torch.tensor([2, 3]))
    output.put_provisional(torch.tensor([4, 5]))
    output.put(torch.tensor([2, 3]))
    output.keep_provisional(1)
    output.keep_provisional(0)
    output.put(torch.tensor([6, 7]))
    output.put_provisional(torch.tensor([8, 9]))
    output.keep_provisional(0)
    output.keep_provisional(0)
    output.end()


def test_provisional_tokens_are_shown_and_taken_back():
    streamer = ProvisionalCalls()
    write(streamer)
    assert streamer.calls == [
        ("put", [1, 1]),
        ("provisional", [2, 3]),
        ("provisional", [4, 5]),
        ("put", [2, 3]),
        ("take back", 1),
        ("put", [6, 7]),
        ("provisional", [8, 9]),
        ("take back", 1),
        "end",
    ]


def test_other_streamers_see_only_tokens_that_stand():
    streamer = Calls()
    write(streamer)
    assert streamer.calls == [("put", [1, 1]), ("put", [2, 3]), ("put", [6, 7]), "end"]
    write(None)
