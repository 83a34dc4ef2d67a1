"""Tokens that leave inside the spans of real servers (`fill="project"`), which is approximate.

What a token is read from in front of block 1 depends on block 0 alone, whose caches are always exact. So where every
token leaves there, it is known which text comes out, whatever happens to servers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from swarm import EarlyExit
from swarm.client.model.train_exits import read_hidden
from swarm.client.routes.events import ExitTaken, HopLost, RouteTaken
from swarm.errors import UsageError
from swarm.server.config import ExitsOption
from tests.client.prompts import NEW, greedy, padded_batch, prompt
from tests.disturbances import Before, holder
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.zoo import BLOCKS, PROMPTS

SPANS = ("0:3", "3:5", "5:6")


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    with run_swarm(folder, SPANS, dtype="float32", exits=ExitsOption()) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


def project(threshold: Any = 0.0, confidence: Any = "softmax", **more: Any) -> EarlyExit:
    return EarlyExit(confidence, threshold, verify=False, fill="project", **more)


@torch.no_grad()
def read_in_front_of(model: Any, block: int, tokens: torch.Tensor, new: int = NEW) -> list[int]:
    """A text whose tokens, but for the first, are read in front of a block. All blocks before are computed in full."""
    text = tokens
    for number in range(new):
        hidden_1TH = model.word_embeddings(text)
        if model.prompts is not None:
            hidden_1TH = torch.cat([model.prompts.unsqueeze(0), hidden_1TH], dim=1)
        hidden_1TH = model.remote_blocks[: block if number else BLOCKS](hidden_1TH)
        following = read_hidden(model, hidden_1TH)[:, -1:].argmax(-1)
        text = torch.cat([text, following], dim=1)
    return text[0].tolist()


class Listener:
    """What happened in a session."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    @property
    def exits(self) -> Counter[int]:
        """Tokens that left, by block."""
        return Counter(event.block for event in self.events if isinstance(event, ExitTaken))

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def test_all_tokens_leave_at_the_first_exit(model):
    listener = Listener()
    with model.inference_session(max_length=64, listener=listener):
        text = greedy(model, prompt(), early_exit=project())
    assert text[0].tolist() == read_in_front_of(model, 1, prompt())
    assert listener.exits == {1: NEW - 1}


@pytest.mark.parametrize("confidence", ["softmax", "similarity"])
def test_with_a_threshold_of_1_texts_are_those_of_the_full_model(model, local, confidence):
    listener = Listener()
    with model.inference_session(max_length=64, listener=listener):
        assert greedy(model, prompt(), early_exit=project(1.0, confidence)).equal(greedy(local, prompt()))
    assert not listener.exits


def test_prompts_and_texts_behind_them_are_computed_in_full_unless_asked(model, local):
    """In a session that allows exits, a call that does not ask for them gets none."""
    listener = Listener()
    with model.inference_session(max_length=64, listener=listener) as session:
        session.prepare_for(project())
        first = greedy(model, prompt())
        assert first.equal(greedy(local, prompt()))
        assert not listener.exits
        greedy(model, first, 4, early_exit=project())
        assert listener.exits == {1: 3}


@pytest.mark.parametrize("later", [EarlyExit(threshold=0.0)])
def test_behind_approximate_caches_a_call_that_wants_exact_ones_computes_again(model, local, later):
    with model.inference_session(max_length=64) as session:
        first = greedy(model, prompt(), early_exit=project())
        assert (session.cache.exact_length, session.position) == (prompt().shape[1], first.shape[1] - 1)
        longer = torch.cat([first, prompt(4, seed=5)], dim=1)
        with pytest.raises(UsageError, match="pass the session instead"):
            greedy(model, longer, 6, early_exit=later, past_key_values=session.cache)
        expected = greedy(local, longer, 6)
        assert greedy(model, longer, 6, early_exit=later).equal(expected)
        assert session.cache.exact_length == session.position == expected.shape[1] - 1


def test_which_token_leaves_depends_on_confidences_only(model):
    """Texts with exits here and there come out the same each time, in one session or another."""
    exits = project({1: 0.999, 2: 0.08, 4: 0.08, 5: 0.06})
    texts, left = [], []
    for _ in range(3):
        listener = Listener()
        with model.inference_session(max_length=64, listener=listener):
            texts.append(greedy(model, prompt(), early_exit=exits).tolist())
        left.append(listener.exits)
    assert texts[0] == texts[1] == texts[2]
    assert left[0] == left[1] == left[2]
    assert 0 < sum(left[0].values()) < NEW - 1
    assert 1 not in left[0]


@pytest.mark.parametrize("batch", ["row", "all"])
def test_batches_share_one_session(model, local, batch):
    listener = Listener()
    expected = [read_in_front_of(model, 1, torch.tensor([row]))[len(row) :] for row in PROMPTS]
    with model.inference_session(max_length=64, listener=listener):
        found = greedy(model, **padded_batch(), early_exit=project(batch=batch))
    assert found[:, -NEW:].tolist() == expected
    assert listener.exits == {1: (NEW - 1) * (len(PROMPTS) if batch == "row" else 1)}
    assert listener.count(RouteTaken) == 1
    found = greedy(model, **padded_batch(), early_exit=project(batch=batch))
    assert found[:, -NEW:].tolist() == expected
    found = greedy(model, **padded_batch(), early_exit=project(1.0, batch=batch))
    assert found.equal(greedy(local, **padded_batch()))


def test_sequences_leave_by_themselves_or_together(model):
    """By themselves, a sequence leaves where it does alone. Together, none leaves before all have been sure."""
    thresholds = {2: 0.08, 4: 0.08, 5: 0.06}
    alone = Counter()
    for row in PROMPTS:
        listener = Listener()
        with model.inference_session(max_length=64, listener=listener):
            greedy(model, torch.tensor([row]), early_exit=project(thresholds))
        alone += listener.exits
    listener = Listener()
    with model.inference_session(max_length=64, listener=listener):
        greedy(model, **padded_batch(), early_exit=project(thresholds))
    assert listener.exits == alone
    listener = Listener()
    with model.inference_session(max_length=64, listener=listener):
        greedy(model, **padded_batch(), early_exit=project(thresholds, batch="all"))
    assert 0 < sum(listener.exits.values()) < NEW  # one for each step


def test_lanes(model):
    expected = [read_in_front_of(model, 1, torch.tensor([row]))[len(row) :] for row in PROMPTS]
    found = greedy(model, **padded_batch(), early_exit=project(), lanes=2)
    assert found[:, -NEW:].tolist() == expected


@pytest.mark.parametrize("mode", ["lora", "deep_ptune"])
def test_adapters(swarm, mode):
    """What is added to a block is added where its keys and values are projected, too."""
    options = {"lora_config": {"r": 2, "init_lora_weights": False}} if mode == "lora" else {"pre_seq_len": 3}
    with run_client(swarm, dtype="float32", wire="none", tuning_mode=mode, **options) as model:
        expected = read_in_front_of(model, 1, prompt())
        assert greedy(model, prompt(), early_exit=project())[0].tolist() == expected
        full = greedy(model, prompt())
        assert greedy(model, prompt(), early_exit=project(1.0)).equal(full)
        assert full[0].tolist() != expected
        found = greedy(model, prompt(), early_exit=project({2: 0.05, 4: 0.02}))
        assert greedy(model, prompt(), early_exit=project({2: 0.05, 4: 0.02})).equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3, 5])
def test_a_server_is_killed_in_the_middle(swarm, model, lost):
    """What it was sent is replayed to the one that takes over, in full."""
    blocks = next(blocks for blocks in SPANS if blocks.startswith(str(lost)))
    expected = read_in_front_of(model, 1, prompt())
    listener = Listener()
    swarm.start(blocks, dtype="float32", exits=ExitsOption()).wait_ready()
    model.swarm.servers()
    with model.inference_session(max_length=64, listener=listener) as session:
        kill = Before(session, {6: lambda session: holder(swarm, session, lost).kill()})
        text = greedy(model, prompt(), early_exit=project(), stopping_criteria=StoppingCriteriaList([kill]))
    assert text[0].tolist() == expected
    assert listener.exits == {1: NEW - 1}
    assert listener.count(HopLost) == 1


def test_a_session_that_has_computed_in_full_stays_exact(model, local):
    with model.inference_session(max_length=64):
        first = greedy(model, prompt(), 4)
        with pytest.raises(UsageError, match="this session has computed tokens without"):
            greedy(model, first, 4, early_exit=project())
        assert greedy(model, first, 4).equal(greedy(local, prompt(), 8))


def test_a_confidence_that_no_server_measures_is_named(model, local, caplog):
    """Servers have classifiers only if they were started with some; this client has none either."""
    with caplog.at_level(logging.WARNING, logger="swarm"):
        found = greedy(model, prompt(), early_exit=project(confidence="classifier"))
    assert found.equal(greedy(local, prompt()))
    said = [record.getMessage() for record in caplog.records if "early_exit" in record.getMessage()]
    assert len(said) == 1
    assert "confidence='classifier'" in said[0]
