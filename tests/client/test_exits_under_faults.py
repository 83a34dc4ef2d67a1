"""Sessions whose tokens leave inside a span, under random faults: what is on its way stays right, the text goes on.

All servers that have block 0 let every token leave behind it. So what comes out anywhere is what this block makes of
the sequence, also after a replay, and the caches of all other blocks are projections.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from swarm.models.execution.span_model import SpanModel
from swarm.models.exits.span_exits import SpanExits
from swarm.protocol import messages
from tests.client.chains import Swarm
from tests.client.test_chain_faults import EACH_SEED, SERVERS, Mischief, run_logged

EXIT = 1
TERMS = messages.ExitTerms("similarity", ((EXIT, 0.0),), "row")


class Sure(SpanExits):
    """Exits at which every token is sure."""

    def measure(self, confidence: Any, block: int, before_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(hidden_RH))


def play(model: SpanModel, seed: int) -> list[str]:
    chance = random.Random(seed)
    log: list[str] = []

    async def scenario() -> None:
        push, older = chance.random() < 0.8, chance.random() < 0.3
        sure = model.with_exits(Sure((EXIT,)))
        swarm = Swarm(sure, SERVERS, missing_blocks_timeout=2e4, push=push, older=older)
        await swarm.start()
        talk = await swarm.chain(early_exits=True)
        talk.exits = TERMS
        mischief = Mischief(swarm, chance, chance.randint(1, 6), chance.choice([0.02, 0.1, 0.5]), chance.random() < 0.5)
        mischief.log = log
        swarm.on_message = mischief
        for _ in range(6):
            await talk.stream(chance, chance.randint(3, 12))
        assert talk.left
        await talk.chain.close()
        log.append(str(swarm.planner.failures))

    return run_logged(scenario, seed, log)


@EACH_SEED
def test_tokens_that_left_stay_what_they_were(span_model, seeds):
    for seed in seeds:
        play(span_model, seed)
