"""The loop with servers on paper that let tokens leave inside their spans: which tokens come out, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm import EarlyExit
from swarm.client.early_exit.exit_decoder import ExitDecoder
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.routes.events import ExitTaken
from swarm.client.sampling import Sampling
from swarm.data_structures import Hop, Route, Span
from swarm.models.exits.trained_exits import BaseModel, TrainedExits
from swarm.protocol.messages import ExitTerms
from tests.client.early_exit.paper_servers import PaperServers
from tests.infos import server_info

SPANS = (Span(0, 3), Span(3, 6), Span(6, 9))
BLOCKS = 9
EXITS = (1, 2, 3, 4, 7, 8)
NEW, ROWS = 6, 2
VOCABULARY = 20 * (NEW + 2)
PAD = 0


@dataclass
class World(PaperServers):
    """Servers of which it is written down what they find sure, and what is said where, by token.

    Attributes:
        sure: by position and row, the blocks in front of which servers find the token sure.
    """

    sure: dict[tuple[int, int], frozenset[int]]
    exits: tuple[int, ...] = EXITS
    asked: list[ExitTerms | None] = field(default_factory=list)

    boundaries = (3, 6)

    @property
    def route(self) -> Route:
        infos = [
            server_info(
                span.start,
                span.end,
                f"p{span.start}",
                exit_blocks=(blocks := tuple(block for block in self.exits if span.start < block <= span.end)),
                exit_confidences=("classifier",) if blocks else (),
            )
            for span in SPANS
        ]
        return Route(tuple(Hop(info, info.span) for info in infos))

    def send(self, tokens: torch.Tensor, exits: ExitTerms | None, exit_block: int | None) -> Any:
        number = len(self.sent)
        self.sent[number], self.positions[number] = self.now, tokens.shape[1]
        self.asked.append(exits)
        return SimpleNamespace(number=number, hidden=torch.zeros(ROWS, 1, VOCABULARY))

    def has_outputs(self, step: Any, block: int) -> bool:
        return self.now >= self.sent[step.number] + block // 3 + 1

    def left(self, step: Any, block: int) -> tuple[int, ...]:
        found = leaving(self.sure, self.positions[step.number], self.asked[step.number])
        return tuple(one if one <= block else 0 for one in found)

    def outputs(self, step: Any, block: int) -> torch.Tensor:
        assert self.has_outputs(step, block)
        position = self.positions[step.number]
        said = [said_at(position, row, left or block) for row, left in enumerate(self.left(step, block))]
        return torch.nn.functional.one_hot(torch.tensor(said).unsqueeze(1), VOCABULARY) * 9.0

    def give_up(self, step: Any) -> None:
        raise AssertionError("nothing is verified")


def said_at(position: int, row: int, block: int) -> int:
    """The token that is read in front of a block, another one everywhere."""
    return 20 * position + 10 * row + block


def leaving(sure: dict[tuple[int, int], frozenset[int]], position: int, terms: ExitTerms | None) -> list[int]:
    """What servers do with a token of each row: the block in front of which it leaves, or 0."""
    left, seen = [0] * ROWS, [False] * ROWS
    for block, _ in terms.thresholds if terms is not None else ():
        seen = [was or block in sure.get((position, row), ()) for row, was in enumerate(seen)]
        if terms.batch == "row":
            left = [before or block * is_sure for before, is_sure in zip(left, seen, strict=True)]
        elif all(seen) and not any(left):
            left = [block] * ROWS
    return left


def generate(world: Any, options: EarlyExit, ends: int | None = None, stop: int | None = None) -> list[list[int]]:
    """The texts.

    Args:
        ends: token that ends a sequence.
        stop: token at which a stopping criterion does.
    """

    def is_finished(tokens: torch.Tensor) -> torch.Tensor:
        over = torch.full((ROWS,), tokens.shape[1] >= 1 + NEW)
        for token in (ends, stop):
            over = over if token is None else over | (tokens == token).any(1)
        return over

    sampling = Sampling(
        process=lambda tokens, logits: logits,
        is_finished=is_finished,
        sample=False,
        pad=torch.tensor(PAD) if ends or stop else None,
        ends=torch.tensor([ends or VOCABULARY]) if ends or stop else None,
        max_length=1 + NEW,
    )
    exits = TrainedExits(BaseModel("m", "r", 1, BLOCKS))
    decoder = ExitDecoder(options, exits, world, world, sampling, TokenOutput())
    first = torch.nn.functional.one_hot(torch.tensor([said_at(1, row, BLOCKS) for row in range(ROWS)]), VOCABULARY)
    return decoder.generate(torch.full((ROWS, 1), 5), first * 9.0).tolist()


def project(batch: Any, **more: Any) -> EarlyExit:
    """This client has no classifiers, so that only servers let tokens leave."""
    return EarlyExit("classifier", 0.5, batch=batch, fill="project", verify=False, **more)


SURE = st.fixed_dictionaries(
    {
        (position, row): st.frozensets(st.sampled_from(EXITS), max_size=3)
        for position in range(2, 1 + NEW)
        for row in range(ROWS)
    }
)


@pytest.mark.parametrize("batch", ["row", "all"])
@given(SURE)
def test_each_token_is_what_is_read_where_it_left(batch, sure):
    world = World(sure)
    texts = generate(world, project(batch))
    terms = ExitTerms("classifier", tuple((block, 0.5) for block in EXITS), batch)
    assert world.asked == [terms] * (NEW - 1)
    left = {position: leaving(sure, position, terms) for position in range(2, 1 + NEW)}
    for row, text in enumerate(texts):
        said = [said_at(position, row, left[position][row] or BLOCKS) for position in range(2, 1 + NEW)]
        assert text == [5, said_at(1, row, BLOCKS), *said]
    counted = [block for blocks in left.values() for block in (blocks if batch == "row" else set(blocks)) if block]
    assert Counter(event.block for event in world.events) == Counter(counted)
    assert all(isinstance(event, ExitTaken) for event in world.events)
    # A step takes as long as the last of its rows; the last one is waited for until all caches are complete.
    hops = [2 + max((block or BLOCKS) - 1 for block in left[position]) // 3 for position in range(2, NEW)]
    assert world.now == sum(hops) + len(SPANS) + 1
    assert world.settled == list(range(NEW - 1))


def test_a_sequence_that_has_ended_is_not_waited_for():
    """Its padding passes all blocks; the other sequence leaves as early as it can."""
    sure = {(position, 1): frozenset({1}) for position in range(3, 1 + NEW)}
    sure[2, 0] = sure[2, 1] = frozenset({7})
    ended = said_at(2, 0, 7)
    world = World(sure)
    texts = generate(world, project("row"), ends=ended)
    assert texts[0] == [5, said_at(1, 0, BLOCKS), ended, *[PAD] * (NEW - 2)]
    assert texts[1][3:] == [said_at(position, 1, 1) for position in range(3, 1 + NEW)]
    assert world.now == 4 + 2 * (NEW - 3) + len(SPANS) + 1
    assert Counter(event.block for event in world.events) == {7: 2, 1: NEW - 2}


def test_servers_are_asked_for_no_more_than_they_offer():
    world = World({}, exits=(4,))
    generate(world, project("row", min_block=2, decay=1.0))
    assert [dict(terms.thresholds).keys() for terms in world.asked] == [{4}] * (NEW - 1)
    values = [dict(terms.thresholds)[4] for terms in world.asked]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] < 0.5
    assert not world.warned
    world = World({}, exits=())
    generate(world, project("row"))
    assert world.asked == [None] * (NEW - 1)
    (message,) = set(world.warned)
    assert "no server of the route has exits" in message
