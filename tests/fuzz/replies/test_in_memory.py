"""Some games with hostile servers, and whether a game would notice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from swarm.routing.peer_health import PeerFailure, PeerHealth
from tests.fuzz.replies import hostile_streams
from tests.fuzz.replies.hostile_streams import Mischief
from tests.fuzz.replies.in_memory import RepliesViolation, play
from tests.fuzz.replies.lies import Lie, other_values, tell
from tests.fuzz.replies.workers import InMemory
from tests.slow import slow_except


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> InMemory:
    return InMemory(tmp_path_factory.mktemp("replies"))


def play_many(player: InMemory) -> None:
    """Games of all sorts."""
    for seed in range(20):
        play(player._model, seed, player.mischief)


# What was found: an adapter that one server alone refuses (13), a step refused and answered all the same (2348).
@pytest.mark.parametrize("seed", slow_except([*range(14), 2348], 1, 13, 2348))
def test_a_game_is_without_violation(player: InMemory, seed: int) -> None:
    play(player._model, seed, player.mischief)


def test_lies_follow_from_their_seed_alone() -> None:
    reply = messages.SessionOpened(3)
    right = Frame(messages.encode(reply))
    told = [[tell(random.Random(seed), reply, right, []) for seed in range(200)] for _ in range(2)]
    assert told[0] == told[1]
    assert len({lie.name for lie in told[0]}) > 8


def test_a_client_that_takes_wrong_values_is_noticed(player: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def deceive(chance: random.Random, message: Any, right: Frame, past: Any) -> Lie:
        payload = other_values(chance, right.payload) if isinstance(message, messages.StepReply) else right.payload
        return Lie("other values", (Frame(right.header, payload),))

    monkeypatch.setattr(hostile_streams, "tell", deceive)
    with pytest.raises(AssertionError):
        play_many(player)


def test_an_honest_server_that_is_blamed_is_noticed(player: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def blame(self: Any) -> None:
        self.swarm.planner.report_failure("a", PeerLost("nobody knows why"))

    monkeypatch.setattr("tests.fuzz.replies.in_memory.Game.converse", lambda self, chance: blame(self))
    with pytest.raises(RepliesViolation, match="honest servers were blamed"):
        play_many(player)


def test_a_forgiving_client_asks_a_hostile_server_again() -> None:
    mischief, health = Mischief(), PeerHealth()
    mischief.make_forgiving(health, {"mean"})
    mischief._mercy = 1
    for peer in ("mean", "honest"):
        health.record_failure(peer, PeerFailure.TIMED_OUT, 0.0)
    assert health.banned_peers(1.0) == {"honest"}
    health.record_failure("mean", PeerFailure.TIMED_OUT, 2.0)
    assert health.banned_peers(3.0) == {"honest", "mean"}
