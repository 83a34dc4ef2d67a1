"""Some games with hostile servers, and whether a game would notice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from swarm.errors import PeerLost
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from tests.fuzz.replies import hostile_streams
from tests.fuzz.replies.hostile_streams import Mischief
from tests.fuzz.replies.in_memory import RepliesViolation, play, tiny_model
from tests.fuzz.replies.lies import Lie, other_values
from tests.slow import slow_except


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    return tiny_model(tmp_path_factory.mktemp("replies"))


def play_many(model: SpanModel) -> None:
    """Games of all sorts."""
    mischief = Mischief()
    for seed in range(20):
        play(model, seed, mischief)


# What was found: an adapter that one server alone refuses (13), a step refused and answered all the same (2348).
@pytest.mark.parametrize("seed", slow_except([1, 5, 8, 13, 2348], 1, 13, 2348))
def test_a_game_is_without_violation(model: SpanModel, seed: int) -> None:
    play(model, seed, Mischief())


def test_a_client_that_takes_wrong_values_is_noticed(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def deceive(chance: random.Random, message: Any, right: Frame, past: Any) -> Lie:
        payload = other_values(chance, right.payload) if isinstance(message, messages.StepReply) else right.payload
        return Lie("other values", (Frame(right.header, payload),))

    monkeypatch.setattr(hostile_streams, "tell", deceive)
    with pytest.raises(AssertionError):
        play_many(model)


def test_an_honest_server_that_is_blamed_is_noticed(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def blame(self: Any) -> None:
        self.swarm.planner.report_failure("a", PeerLost("nobody knows why"))

    monkeypatch.setattr("tests.fuzz.replies.in_memory.Game.converse", lambda self, chance: blame(self))
    with pytest.raises(RepliesViolation, match="honest servers were blamed"):
        play_many(model)
