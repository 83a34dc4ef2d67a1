"""The loop over servers that exist on paper: which tokens come out, and how long that takes, to the delay; and what it
reads, looks at and verifies."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit import exit_decoder
from swarm.client.early_exit.exit_decoder import (
    MIN_GAIN,
    TRIED_EVERY,
    ExitDecoder,
    HiddenReader,
    LookMeter,
)
from swarm.client.early_exit.options import EarlyExit
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.routes.events import ExitTaken
from swarm.client.sampling import Sampling
from swarm.data_structures import Hop, Route
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, ExitLens, TrainedExits
from tests.client.early_exit.paper_servers import PaperServers
from tests.infos import server_info

pytestmark = pytest.mark.usefixtures("always_look")

SERVERS = 4
"""Each has one block."""

VOCABULARY = 11
NEW = 8


def right(position: int) -> int:
    """What the full model says behind so many tokens."""
    return (7 * position + 3) % VOCABULARY


@dataclass
class World(PaperServers):
    """Servers of which it is written down what is said in front of them.

    Attributes:
        early: by position, what is said in front of each block but the first.
        given_up: positions of steps that were given up.
        looked_at: blocks in front of which, or behind the last of which, hidden states were looked at.
    """

    early: dict[int, tuple[int, ...]]
    given_up: list[int] = field(default_factory=list)
    looked_at: set[int] = field(default_factory=set)
    exit_blocks: list[int | None] = field(default_factory=list)

    boundaries = tuple(range(1, SERVERS))
    route = Route(tuple(Hop(info, info.span) for info in (server_info(n, n + 1, f"p{n}") for n in range(SERVERS))))

    def send(self, tokens: torch.Tensor, exits: Any, exit_block: int | None) -> Any:
        assert exits is None
        number = len(self.sent)
        self.exit_blocks.append(exit_block)
        self.sent[number], self.positions[number] = self.now, tokens.shape[1]
        return SimpleNamespace(number=number, hidden=torch.zeros(1, 1, VOCABULARY))

    def has_outputs(self, step: Any, block: int) -> bool:
        return self.now >= self.sent[step.number] + block + 1

    def outputs(self, step: Any, block: int) -> torch.Tensor:
        assert self.has_outputs(step, block)
        self.looked_at.add(block)
        position = self.positions[step.number]
        said = right(position) if block == SERVERS else self.early[position][block - 1]
        return torch.nn.functional.one_hot(torch.tensor([[said]]), VOCABULARY) * 9.0

    def left(self, step: Any, block: int) -> tuple[int, ...]:
        return (0,)

    def give_up(self, step: Any) -> None:
        self.given_up += [self.positions[number] for number in self.sent if number >= step.number]


def generate(early: dict[int, tuple[int, ...]], options: EarlyExit, streamer: Any = None) -> tuple[list[int], World]:
    world: Any = World(early)
    sampling = Sampling(
        process=lambda tokens, logits: logits,
        is_finished=lambda tokens: torch.tensor([tokens.shape[1] >= 1 + NEW]),
        sample=False,
        pad=None,
        ends=None,
        max_length=1 + NEW,
    )
    exits = TrainedExits(BaseModel("m", "r", 1, SERVERS))
    decoder = ExitDecoder(options, exits, world, world, sampling, TokenOutput(streamer))
    first = torch.nn.functional.one_hot(torch.tensor([right(1)]), VOCABULARY) * 9.0
    return decoder.generate(torch.tensor([[5]]), first)[0].tolist(), world


EXPECTED = [5, *(right(position) for position in range(1, 1 + NEW))]
SAID = st.fixed_dictionaries(
    {
        position: st.tuples(*[st.sampled_from([right(position), (right(position) + 1) % VOCABULARY])] * (SERVERS - 1))
        for position in range(2, 1 + NEW)
    }
)


def delay(position: int, early: tuple[int, ...]) -> int:
    """When the successor of a token is sent that stands: behind the server from which on all say the right thing."""
    wrong = [block for block, said in enumerate(early, 1) if said != right(position)]
    first = max(wrong, default=0) + 1
    return first + 1


@given(SAID)
def test_verified_texts_are_right_and_take_what_exits_allow(early):
    text, world = generate(early, EarlyExit(threshold=0.0))
    assert text == EXPECTED
    # The last token's successor is the answer to the one before, which has to be verified.
    total = sum(delay(position, early[position]) for position in range(2, NEW)) + SERVERS + 1
    assert world.now == total
    assert world.settled == sorted(world.settled)


@given(SAID)
def test_unverified_texts_are_what_the_first_server_says(early):
    text, world = generate(early, EarlyExit(threshold=0.0, verify=False))
    assert text == [5, right(1), *(early[position][0] for position in range(2, 1 + NEW))]
    assert not world.given_up
    assert len(world.settled) == NEW - 1, "all caches are complete in the end"
    assert world.now == 2 * (NEW - 2) + SERVERS + 1


@given(SAID)
def test_without_confidence_nothing_leaves(early):
    for verify in (True, False):
        text, world = generate(early, EarlyExit(threshold=1.0, verify=verify))
        assert text == EXPECTED
        assert world.now == (NEW - 1) * (SERVERS + 1)
        assert not world.given_up


def test_only_where_it_may_leave():
    early = {position: (right(position),) * (SERVERS - 1) for position in range(2, 1 + NEW)}
    for options, block in (
        (EarlyExit(threshold=0.5, min_block=2), 2),
        (EarlyExit(threshold={3: 0.5}), 3),
        (EarlyExit(threshold=0.5, max_block=1), 1),
    ):
        text, world = generate(early, options)
        assert text == EXPECTED
        assert {event.block for event in world.events} == {block}
        assert world.looked_at == {*options.looked_at(world.boundaries), SERVERS}
        assert world.now == (NEW - 2) * (block + 1) + SERVERS + 1
        assert set(world.exit_blocks) == {block}, "servers behind it are told that this is not urgent there"


def test_near_servers_are_not_guessed_at(monkeypatch):
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", float("inf"))
    early = {position: ((right(position) + 1) % VOCABULARY,) * (SERVERS - 1) for position in range(2, 1 + NEW)}
    text, world = generate(early, EarlyExit(threshold=0.0))
    assert text == EXPECTED
    assert sum(isinstance(event, ExitTaken) for event in world.events) == 2, "then it is known what a look costs"
    assert world.exit_blocks[0] == 1
    assert world.exit_blocks[-1] is None, "the last server's answer is waited for"


class Screen:
    """What a person would see.

    Attributes:
        text: tokens that stand.
        provisional: those behind, which may be taken back.
        seen: all tokens that were shown at each place.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.provisional: list[int] = []
        self.seen: dict[int, list[int]] = {}

    def put(self, value: torch.Tensor) -> None:
        if self.provisional:
            assert self.provisional.pop(0) == int(value)
        self.text.append(int(value))

    def put_provisional(self, value: torch.Tensor) -> None:
        self.seen.setdefault(len(self.text) + len(self.provisional), []).append(int(value))
        self.provisional.append(int(value))

    def take_back(self, count: int) -> None:
        assert 0 < count <= len(self.provisional)
        del self.provisional[-count:]

    def end(self) -> None:
        raise AssertionError("the text goes on behind this loop")


@given(SAID)
def test_provisional_tokens_stand_or_are_taken_back(early):
    screen = Screen()
    text, _ = generate(early, EarlyExit(threshold=0.0), screen)
    assert screen.text == text[1:] == EXPECTED[1:]
    assert not screen.provisional
    for place in range(1, NEW):
        assert screen.seen[place][0] == early[place + 1][0], "it is shown when the first server has answered"
        assert set(screen.seen[place]) <= set(early[place + 1])


@given(SAID)
def test_without_verification_every_token_stands_at_once(early):
    screen = Screen()
    text, _ = generate(early, EarlyExit(threshold=0.0, verify=False), screen)
    assert screen.text == text[1:]
    assert not screen.seen


BLOCKS, WIDTH = 6, 3
LENSES = {block: ExitLens(torch.eye(WIDTH) * block, torch.full((WIDTH,), float(block))) for block in (2, 4)}
CLASSIFIERS = {4: ExitClassifier(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(1))}
HIDDEN_R1H = torch.arange(12.0).view(4, 1, WIDTH)


def reader(**options: object) -> HiddenReader:
    exits = TrainedExits(BaseModel("m", "r", WIDTH, BLOCKS), LENSES, CLASSIFIERS)
    return HiddenReader(EarlyExit(**options), exits, lambda hidden_R1H: hidden_R1H[:, -1])


def test_each_sequence_is_read_through_its_own_lens():
    found = reader().logits(HIDDEN_R1H, [2, BLOCKS, 4, 3])
    plain = HIDDEN_R1H[:, 0]
    assert found.equal(torch.stack([2 * plain[0] + 2, plain[1], 4 * plain[2] + 4, plain[3]]))


def test_confidences():
    before = torch.ones(4, WIDTH)
    sure, logits = reader(confidence="similarity").confidence(4, before, HIDDEN_R1H)
    assert logits is None
    assert sure.tolist() == pytest.approx(
        torch.nn.functional.cosine_similarity(before, HIDDEN_R1H[:, 0], dim=-1).tolist()
    )
    sure, logits = reader(confidence="classifier").confidence(4, before, HIDDEN_R1H)
    assert logits is None
    assert sure.equal(torch.sigmoid(HIDDEN_R1H[:, 0, 0]))
    sure, logits = reader().confidence(4, before, HIDDEN_R1H)
    assert logits.equal(4 * HIDDEN_R1H[:, 0] + 4)
    top = logits.softmax(-1).topk(2).values
    assert sure.equal(top[:, 0] - top[:, 1])


def test_a_block_without_a_classifier():
    before = torch.ones(4, WIDTH)
    # After a failover, servers may begin elsewhere; with fill="project" they have classifiers of their own.
    for options in ({}, {"fill": "project", "verify": False}):
        one = reader(confidence="classifier", **options)
        assert one.confidence(2, before, HIDDEN_R1H)[0].equal(torch.zeros(4))
        assert one.confidence(4, before, HIDDEN_R1H)[0].equal(torch.sigmoid(HIDDEN_R1H[:, 0, 0]))


def seen(look_s: float, lag_s: float) -> LookMeter:
    meter = LookMeter()
    for _ in range(50):
        meter.on_look(look_s)
        meter.on_answer(lag_s)
    return meter


def test_far_servers_are_worth_it_and_near_ones_only_now_and_then(monkeypatch):
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", MIN_GAIN)
    assert all(seen(0.001, MIN_GAIN * 0.001).is_worth_looking() for _ in range(50))
    near = seen(0.001, 0.5 * MIN_GAIN * 0.001)
    assert sum(near.is_worth_looking() for _ in range(10 * TRIED_EVERY)) == 10
