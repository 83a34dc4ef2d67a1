"""From the tokens of a sequence to its output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_output import SequenceOutput
from swarm.generation.sequence_request import SequenceRequest


def test_a_stop_sequence_in_text_that_was_held_back_counts():
    pieces: Any = SimpleNamespace(add_token=lambda token: "", finish=lambda: "so END far")
    text = SequenceOutput(pieces, SequenceRequest(stops=["END"]))
    assert text.add_token(SampledToken(1), is_end=False) is None
    assert text.finish().text == "so "
    assert text.stopped


def test_a_preview_leaves_the_output_as_it_is():
    pieces: Any = SimpleNamespace(
        add_token=lambda token: f"{token} ", preview=lambda tokens: "".join(f"{token} " for token in tokens)
    )
    output = SequenceOutput(pieces, SequenceRequest(stops=["5"]))
    assert output.preview([]) == ""
    assert output.preview([2, 3]) == "2 3 "
    assert output.preview([4, 5, 6]) == "4 "
    delta = output.add_token(SampledToken(2), is_end=False)
    assert delta is not None
    assert delta.text == "2 "
    assert not output.stopped
    with_tools: Any = SequenceRequest(tools=SimpleNamespace())  # type: ignore[arg-type]
    assert SequenceOutput(pieces, with_tools).preview([2]) == ""
