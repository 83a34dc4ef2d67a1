"""From tokens to what is told of one sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarm.gateway.generation import Work, _Text
from swarm.generation.sampling import Chosen, Sampling


def test_a_stop_in_what_was_held_back_is_one():
    pieces: Any = SimpleNamespace(add=lambda token: "", end=lambda: "so END far")
    text = _Text(pieces, Work([1], 1, Sampling(), stops=["END"]))
    assert text.add(Chosen(1), is_end=False) is None
    assert text.end().text == "so "
    assert text.stopped
