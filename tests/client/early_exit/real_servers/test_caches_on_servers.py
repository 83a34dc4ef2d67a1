"""Behind tokens that left early, every server's cache is that of plain generation of the same tokens.

A step of plain generation brings one token of each sequence, and so does one of generation with exits. So a server
computes the same products of the same shapes, whatever was given up between them, and the caches are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteriaList

from swarm import EarlyExit
from swarm.client.routes.events import ExitTaken, ExitVerified
from tests.client.conftest import SPANS
from tests.client.prompts import greedy, padded_batch, prompt
from tests.disturbances import Before, holder
from tests.server_caches import CachedSession, largest_difference
from tests.slow import slow_except
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("always_look")

NEW = 40
MAX_LENGTH = 96

REPLAY_TOLERANCE = 1e-4
"""A server that takes over computes the history at once, in products of other shapes than token by token. Sums of 32
and 48 float32 products in another order differ by some 1e-6 of their largest value, through six blocks by a little
more; a cache of anything else differs by some tenths."""


class Forced:
    """A logits processor that lets plain generation choose the tokens of given texts `[sequences, tokens]`."""

    def __init__(self, texts: torch.Tensor) -> None:
        self._texts = texts

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).scatter_(1, self._texts[:, tokens.shape[1], None], 1.0)


def plain_caches(swarm: TestSwarm, model: Any, inputs: dict[str, Any], texts: torch.Tensor) -> list[CachedSession]:
    """What the servers hold after plain generation of these tokens."""
    with model.inference_session(max_length=MAX_LENGTH) as session:
        forced, new = LogitsProcessorList([Forced(texts)]), texts.shape[1] - inputs["input_ids"].shape[1]
        assert greedy(model, **inputs, new=new, logits_processor=forced).equal(texts)
        return swarm.caches(session)


def exits_and_caches(
    swarm: TestSwarm, model: Any, inputs: dict[str, Any], exits: EarlyExit
) -> tuple[torch.Tensor, list[CachedSession]]:
    """A text of which something was given up, or with `verify=False` left early, and what the servers hold then.

    Where this process is slow, answers may come before it can look; then the text is generated again.
    """
    found: list[tuple[torch.Tensor, list[CachedSession]]] = []

    def left() -> bool:
        events: list[Any] = []
        with model.inference_session(max_length=MAX_LENGTH, listener=events.append) as session:
            texts = greedy(model, **inputs, new=NEW, early_exit=exits)
            found.append((texts, swarm.caches(session)))
        if exits.verify:
            return any(isinstance(one, ExitVerified) and not one.stands for one in events)
        return any(isinstance(one, ExitTaken) for one in events)

    wait_until(left)
    return found[-1]


EXITS = {
    "given up": EarlyExit(threshold=0.0, batch="all"),
    "threshold": EarlyExit(threshold=0.02, batch="all"),
    "unverified": EarlyExit(threshold=0.0, batch="all", verify=False),
}


@pytest.mark.parametrize("exits", EXITS)
def test_caches_are_those_of_plain_generation(swarm, model, exits):
    inputs = padded_batch()
    texts, found = exits_and_caches(swarm, model, inputs, EXITS[exits])
    assert [one.span for one in found] == list(SPANS)
    assert {max(one.lengths) for one in found} == {texts.shape[1] - 1}
    assert largest_difference(found, plain_caches(swarm, model, inputs, texts)) == 0


def test_a_text_that_goes_on_overwrites_what_was_given_up_behind_its_end(swarm, model, local):
    """Where a text ends, tokens behind its end may be on their way."""
    inputs = {"input_ids": prompt()}
    end = int(greedy(local, prompt())[0, 12])
    with model.inference_session(max_length=MAX_LENGTH) as session:
        text = greedy(model, prompt(), NEW, early_exit=EXITS["given up"], eos_token_id=end)
        assert text.shape[1] < NEW
        text = greedy(model, torch.cat([text, prompt(3, seed=5)], dim=1), 6)
        found = swarm.caches(session)
    # Three tokens were computed at once.
    assert largest_difference(found, plain_caches(swarm, model, inputs, text)) < REPLAY_TOLERANCE


def with_lora(swarm: TestSwarm, folder: Path) -> dict[str, Any]:
    """Options of a client with a LoRA adapter for queries and values, which PEFT has saved."""
    local = AutoModelForCausalLM.from_pretrained(swarm.model, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(local, config).save_pretrained(folder)
    return {"adapter": folder}


def with_prompts(swarm: TestSwarm, folder: Path) -> dict[str, Any]:
    """Options of a client with prompts in front of every block."""
    return {"tuning_mode": "deep_ptune", "pre_seq_len": 4}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [with_lora, with_prompts])
@pytest.mark.parametrize("exits", ["given up", "unverified"])
def test_caches_of_sessions_with_adapters(
    swarm, model, tmp_path, exits, adapter: Callable[[TestSwarm, Path], dict[str, Any]]
):
    inputs = padded_batch()
    with run_client(swarm, dtype="float32", **adapter(swarm, tmp_path)) as adapted:
        if getattr(adapted, "deep_prompts", None) is not None:
            with torch.no_grad():
                adapted.deep_prompts.normal_(std=0.3)
        texts, found = exits_and_caches(swarm, adapted, inputs, EXITS[exits])
        assert largest_difference(found, plain_caches(swarm, adapted, inputs, texts)) == 0
        if adapter is with_lora:
            assert largest_difference(found, plain_caches(swarm, model, inputs, texts)) > REPLAY_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("exits", slow_except(["given up", "unverified"], "given up"))
def test_caches_after_a_server_was_lost_in_the_middle(folder, exits):
    inputs = {"input_ids": prompt()}
    with run_swarm(folder, (*SPANS, "2:3"), dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        with model.inference_session(max_length=MAX_LENGTH) as session:
            before = Before(session, {NEW // 2: lambda session: holder(swarm, session, 2).kill()})
            stopping = StoppingCriteriaList([before])
            text = greedy(model, **inputs, new=NEW, early_exit=EXITS[exits], stopping_criteria=stopping)
            found = swarm.caches(session)
        assert len(swarm.holders("2:3")) == 1
        assert largest_difference(found, plain_caches(swarm, model, inputs, text)) < REPLAY_TOLERANCE
