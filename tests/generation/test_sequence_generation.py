"""What a sequence tells of its exits, of what may be taken back, and of its prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit.token_output import ProvisionalStreamer
from swarm.client.routes.events import ExitTaken, ExitVerified, PromptComputed
from swarm.client.threads.compute_lock import ComputeLock
from swarm.generation import sequence_generation
from swarm.generation.early_exits import ExitCounts, ProvisionalText, count_exit, exit_details
from swarm.generation.sequence_generation import (
    PromptProgress,
    SequenceEnd,
    SequenceEvent,
    SequenceGeneration,
)
from swarm.generation.sequence_request import SequenceRequest
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer


def counted(*events: ExitTaken | ExitVerified) -> ExitCounts:
    counts: ExitCounts = Counter()
    for event in events:
        count_exit(counts, event)
    return counts


def test_exits_are_counted_by_boundary():
    counts = counted(ExitTaken(8), ExitTaken(4), ExitTaken(4), ExitVerified(4, True), ExitVerified(8, False))
    assert exit_details([counts]) == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 8, "taken": 1, "stood": 0, "given_up": 1},
    ]
    assert exit_details([Counter()]) == []


def test_the_sequences_of_a_request_are_added_up():
    first, second = counted(ExitTaken(4), ExitVerified(4, True)), counted(ExitTaken(4), ExitTaken(6))
    assert exit_details([first, second, Counter()]) == [
        {"block": 4, "taken": 2, "stood": 1, "given_up": 0},
        {"block": 6, "taken": 1, "stood": 0, "given_up": 0},
    ]
    assert exit_details([first]) == [{"block": 4, "taken": 1, "stood": 1, "given_up": 0}]


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


class _Computed(SequenceGeneration):
    """Computes its prompt in two chunks, and all of it in two more behind the first token."""

    def _generate(self) -> str:
        for self.tokens in (0, 1):
            self._on_session_event(PromptComputed(2))
            self._on_session_event(PromptComputed(3))
        return "stop"


@pytest.mark.parametrize("period_s", [0.0, 60.0])
def test_progress_is_that_of_the_prompt_and_reported_now_and_then(
    monkeypatch: pytest.MonkeyPatch, period_s: float
) -> None:
    monkeypatch.setattr(sequence_generation, "PROGRESS_PERIOD_S", period_s)
    served: Any = SimpleNamespace(
        compute_lock=ComputeLock(), end_tokens=frozenset(), tokenizer=load_tokenizer(DEMO_FOLDER)
    )
    told: list[SequenceEvent] = []

    async def work() -> None:
        generation = _Computed(served, SequenceRequest(prompt=[5, 6, 7], limit=1), told.append)
        generation.start()
        await generation.wait_ended()

    asyncio.run(work())
    progress = [] if period_s else [PromptProgress(2, 3), PromptProgress(3, 3)]
    assert told == [*progress, SequenceEnd("stop", 1)]
