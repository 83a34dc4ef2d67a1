"""Draft heads that are trained over real servers, and guess there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.routes.events import GuessVerified
from swarm.client.tuning.options import TuningOptions
from swarm.errors import AdapterMismatch, UsageError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from tests import zoo
from tests.client.prompts import greedy, padded_batch, prompt
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.zoo import BLOCKS

pytestmark = pytest.mark.usefixtures("always_guess")


@pytest.fixture(scope="module")
def texts(local: Any) -> list[torch.Tensor]:
    """What the model itself writes."""
    return written(local, 48, 64)


def written(local: Any, count: int, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    start = torch.randint(3, 100, (count, 1))
    settings = {"do_sample": True, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    return [local.generate(start, attention_mask=torch.ones_like(start), **settings)]


@pytest.fixture(scope="module")
def trained(swarm: TestSwarm, texts: list[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """A client with a draft head, and what that is worth."""
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model, model.train_draft(texts, passes=10, progress=lambda *_: None)


def guessed(model: Any, new: int = 24) -> tuple[torch.Tensor, list[bool]]:
    """A text with guesses by the head, and of each guess whether it stood."""
    events: list[Any] = []
    with model.inference_session(max_length=100, listener=events.append):
        text = greedy(model, prompt(), new, draft="head")
    assert all(event.draft == "head" for event in events if isinstance(event, GuessVerified))
    return text, [event.stands for event in events if isinstance(event, GuessVerified)]


def test_a_head_learns_to_guess() -> None:
    """Of a model that was trained itself; those without are noise."""
    local = load_local_model(DEMO_FOLDER)
    with (
        run_swarm(DEMO_FOLDER, ("0:6", "6:12"), dtype="float32") as swarm,
        run_client(swarm, dtype="float32", wire="none") as model,
    ):
        quality = model.train_draft(written(local, 64, 160))
        assert len(quality.before) == len(quality.after) == 4
        assert max(quality.before) < 0.05
        assert min(quality.after) > 0.1
        text, stands = guessed(model, 80)
    assert text.equal(greedy(local, prompt(), 80))
    assert sum(stands) > 0.07 * len(stands)


def test_guesses_of_a_head_change_no_text(trained: Any, local: Any) -> None:
    model, quality = trained
    assert quality.after[0] > quality.before[0] + 0.03
    text, stands = guessed(model)
    assert text.equal(greedy(local, prompt(), 24))
    assert stands
    torch.manual_seed(3)
    sampled = model.generate(prompt(), draft=["copies", "head"], do_sample=True, max_new_tokens=20, pad_token_id=0)
    torch.manual_seed(3)
    assert sampled.equal(local.generate(prompt(), do_sample=True, max_new_tokens=20, pad_token_id=0))


def test_texts_of_a_batch_and_of_a_session_that_goes_on(trained: Any, local: Any) -> None:
    model, _ = trained
    assert greedy(model, **padded_batch(), draft="head").equal(greedy(local, **padded_batch()))
    text = prompt()
    with model.inference_session(max_length=100):
        for number in range(3):  # what earlier calls have computed is not known to the head of the next one
            written = greedy(model, text, 8, draft="head")
            assert written.equal(greedy(local, text, 8))
            text = torch.cat([written, prompt(1 + number, seed=number)], dim=1)


def test_heads_are_kept_and_learn_further(trained: Any, swarm: TestSwarm, texts: Any, tmp_path: Path) -> None:
    model, quality = trained
    model.save_draft(tmp_path)
    with run_client(swarm, dtype="float32", wire="none") as other:
        with pytest.raises(
            UsageError, match=r"draft='head' needs a draft head; call model\.train_draft or model\.load_draft first"
        ):
            greedy(other, prompt(), draft="head")
        with pytest.raises(UsageError, match=r"has no draft head to save; call model\.train_draft first"):
            other.save_draft(tmp_path)
        other.load_draft(tmp_path)
        assert guessed(other)[1]
        assert not any("draft" in name for name, _ in other.named_parameters())
        done: list[tuple[int, int]] = []
        further = other.train_draft(texts, passes=1, progress=lambda *numbers: done.append(numbers))
        assert further.before == pytest.approx(quality.after)
        assert done[-1][0] == done[-1][1] == len(done)
        other.swarm.identity = type(other.swarm.identity)("other", "another revision", BLOCKS)
        with pytest.raises(AdapterMismatch, match="train a draft head for it"):
            other.load_draft(tmp_path)
        with pytest.raises(UsageError, match="have to be longer"):
            other.train_draft([])


@pytest.mark.parametrize("family", ["opt_projected", "qwen3_5_text"])
def test_embeddings_of_another_width_and_states(tmp_path: Path, texts: Any, family: str) -> None:
    folder = zoo.make_checkpoint(family, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with run_swarm(folder, ("0:3", "3:6"), dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        model.train_draft(texts, passes=1)
        text, stands = guessed(model)
        assert stands
        assert text.equal(greedy(local, prompt(), 24))


def test_virtual_tokens_and_half_precision(swarm: TestSwarm, texts: Any) -> None:
    tuning = TuningOptions(pre_seq_len=3)
    with run_client(swarm, dtype="bfloat16", wire="none", tuning_mode="ptune", tuning=tuning) as model:
        quality = model.train_draft(texts, passes=4)
        assert quality.after[0] > quality.before[0]
        text, stands = guessed(model)
        assert stands
        assert text.equal(greedy(model, prompt(), 24))
