"""From the tokens of a sequence to its output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarm.generation.sampling import SampledToken, SamplingOptions
from swarm.generation.sequence_generation import SequenceRequest, _SequenceOutput


def test_a_stop_sequence_in_text_that_was_held_back_counts():
    pieces: Any = SimpleNamespace(add_token=lambda token: "", finish=lambda: "so END far")
    text = _SequenceOutput(pieces, SequenceRequest([1], 1, SamplingOptions(), stops=["END"]))
    assert text.add_token(SampledToken(1), is_end=False) is None
    assert text.finish().text == "so "
    assert text.stopped
