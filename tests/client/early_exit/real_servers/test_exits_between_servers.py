"""Tokens that leave between real servers: with `verify` the text is that of the full model, whatever the threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList, SynthIDTextWatermarkingConfig

from swarm import EarlyExit
from swarm.client.routes.events import ExitTaken, ExitVerified
from swarm.errors import UsageError
from tests.client.prompts import NEW, PAD, greedy, padded_batch, prompt
from tests.swarms import TestSwarm, run_client
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("always_look")


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


class Listener:
    """Counts the tokens that left."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def count(self, kind: type, **values: Any) -> int:
        return sum(
            isinstance(event, kind) and all(getattr(event, name) == value for name, value in values.items())
            for event in self.events
        )


@pytest.mark.parametrize(("confidence", "threshold"), [("softmax", 0.01), ("softmax", 1.0), ("similarity", 0.03)])
def test_greedy_texts_are_those_of_the_full_model(model, local, confidence, threshold):
    listener = Listener()
    exits = EarlyExit(confidence, threshold)
    with model.inference_session(max_length=64, listener=listener):
        assert greedy(model, prompt(), early_exit=exits).equal(greedy(local, prompt()))
    if threshold == 1.0:
        assert not listener.count(ExitTaken)


def test_greedy_texts_are_those_of_the_full_model_if_nearly_everything_is_given_up(model, local):
    """An untrained model is seldom right so early. Where this process is slow, answers come before it can look."""
    listener, expected = Listener(), greedy(local, prompt())

    def text_with_exits() -> bool:
        with model.inference_session(max_length=64, listener=listener):
            assert greedy(model, prompt(), early_exit=EarlyExit(threshold=0.0)).equal(expected)
        return bool(listener.count(ExitVerified, stands=False))

    wait_until(text_with_exits)


def test_a_session_goes_on_behind_tokens_that_were_given_up(model, local):
    exits = EarlyExit(threshold=0.0)
    with model.inference_session(max_length=96):
        first = greedy(model, prompt(), 9, early_exit=exits)
        assert first.equal(greedy(local, prompt(), 9))
        longer = torch.cat([first, prompt(4, seed=5)], dim=1)
        assert greedy(model, longer, 6).equal(greedy(local, longer, 6))
        other = torch.cat([first[:, :10], prompt(3, seed=6)], dim=1)
        assert greedy(model, other, 6, early_exit=exits).equal(greedy(local, other, 6))


@pytest.mark.parametrize("batch", ["row", "all"])
def test_sequences_that_end_at_different_places_are_padded(model, local, batch):
    plain = greedy(local, **padded_batch())
    ends = [int(plain[0, -NEW + 5]), int(plain[1, -NEW + 14])]
    expected = greedy(local, **padded_batch(), eos_token_id=ends)
    lengths = (expected[:, -NEW:] != PAD).sum(1)
    assert lengths[0] != lengths[1]
    exits = EarlyExit(threshold=0.0, batch=batch)
    assert greedy(model, **padded_batch(), eos_token_id=ends, early_exit=exits).equal(expected)


def test_without_verification_the_early_token_stands_and_caches_are_those_of_the_full_model(model, local):
    """What was said first and then continued without exits is what the full model says behind the same tokens."""
    listener = Listener()
    with model.inference_session(max_length=96, listener=listener):
        early = greedy(model, prompt(), 12, early_exit=EarlyExit(threshold=0.0, verify=False))
        assert not early.equal(greedy(local, prompt(), 12))
        assert listener.count(ExitTaken) >= 10
        assert not listener.count(ExitVerified)
        assert greedy(model, early, 8).equal(greedy(local, early, 8))


def test_stopping_criteria_see_certain_tokens_only(model, local):
    seen: list[list[int]] = []

    def watch(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return torch.tensor([len(seen) == 10])

    found = greedy(
        model, prompt(), early_exit=EarlyExit(threshold=0.0), stopping_criteria=StoppingCriteriaList([watch])
    )
    expected = greedy(local, prompt(), 10)
    assert found.equal(expected)
    assert seen == [expected[0, : 8 + count].tolist() for count in range(10)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "not for beam search"),
        ({"prompt_lookup_num_tokens": 3}, "not for assisted generation"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "does not collect what output_hidden_states"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "does not collect what output_attentions"),
        ({"use_cache": False}, "needs a session"),
        ({"guidance_scale": 2.0}, "does not go together with UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2])},
            "does not go together with SynthIDTextWatermarkLogitsProcessor",
        ),
    ],
)
def test_what_does_not_go_together(model, settings, message):
    with pytest.raises(UsageError, match=message):
        greedy(model, prompt(), 4, early_exit=EarlyExit(), **settings)
    assert greedy(model, prompt(), 4).shape == (1, 11)


ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("batch", ["row", "all"])
def test_scores_are_those_that_verified(model, local, batch):
    """Processed ones too: what may not be repeated depends on the tokens before."""
    settings = {**padded_batch(), "no_repeat_ngram_size": 1, **ALL}
    expected = greedy(local, **settings)
    found = greedy(model, **settings, early_exit=EarlyExit(threshold=0.0, batch=batch))
    assert found.sequences.equal(expected.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == NEW
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4)


def test_unverified_scores_are_those_where_the_token_left(model):
    found = greedy(model, prompt(), early_exit=EarlyExit(threshold=0.0, verify=False), **ALL)
    assert torch.stack([scores[0].argmax() for scores in found.scores]).equal(found.sequences[0, 7:])


def test_what_a_session_says_holds_unless_a_call_says_otherwise(model, local):
    listener = Listener()
    exits = EarlyExit(threshold=0.0, verify=False)
    with model.inference_session(max_length=96, listener=listener, early_exit=exits):
        early = greedy(model, prompt())
        taken = listener.count(ExitTaken)
        assert taken == NEW - 1
        longer = torch.cat([early, prompt(4, seed=5)], dim=1)
        assert greedy(model, longer, 6, early_exit=None).equal(greedy(local, longer, 6))
        assert listener.count(ExitTaken) == taken
        with pytest.raises(UsageError, match="not for beam search; pass early_exit=None"):
            greedy(model, prompt(), 4, num_beams=2)
    assert not greedy(model, prompt()).equal(early), "without a session, nothing leaves"
