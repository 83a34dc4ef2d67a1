"""Guessed tokens over HTTP: answers are those without drafts, whatever a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

from swarm.errors import InvalidOption
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests import zoo
from tests.gateway.test_early_exit import SETTINGS, ask, done
from tests.gateways import GatewayProcess, run_gateway
from tests.swarms import TestSwarm, run_client
from tests.waiting import wait_until

STORY = "Tell it again: " + 3 * "Once upon a time there was a girl who lived in a house. "


@pytest.fixture(scope="module")
def gateway(swarm: TestSwarm) -> Iterator[GatewayProcess]:
    """The demo model guesses for itself."""
    with run_gateway(swarm, drafts=["copies", str(DEMO_FOLDER)]) as running:
        yield running


@pytest.fixture(scope="module")
def plain(swarm: TestSwarm) -> Iterator[openai.OpenAI]:
    with run_gateway(swarm, drafts=["none"]) as running, _client(running) as made:
        yield made


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with _client(gateway) as made:
        yield made


def _client(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("settings", [*SETTINGS, {"logprobs": True, "top_logprobs": 2, "temperature": 0}])
def test_answers_are_those_without_drafts(plain, client, settings):
    found, expected = (ask(one, **settings) for one in (client, plain))
    assert [choice.message.content for choice in found.choices] == [one.message.content for one in expected.choices]
    assert [choice.finish_reason for choice in found.choices] == [one.finish_reason for one in expected.choices]
    assert found.usage.total_tokens == expected.usage.total_tokens
    if "logprobs" in settings:
        ours, theirs = (one.choices[0].logprobs.content for one in (found, expected))
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-3)


def test_details_and_metrics_say_what_was_guessed(client, gateway, plain):
    guesses: dict[str, Any] = {}

    def has_guessed() -> bool:
        """Where servers are near, guessing may not pay."""
        detail = done(client, None, max_tokens=64)
        guesses.update({one["draft"]: one for one in detail.get("guesses", ())})
        return "model" in guesses

    wait_until(has_guessed)
    assert guesses["model"]["stood"] + guesses["model"]["wrong"] > 0
    assert gateway.metric("swarm_client_guesses_total") > 0
    assert "guesses" not in done(plain, None)
    assert "guesses" not in done(client, {"threshold": 0.5}), "early exit guesses by itself"


def test_a_draft_head_is_loaded_from_its_folder(swarm, plain, tmp_path):
    with run_client(swarm) as model:
        model.train_draft([torch.randint(2048, (640,))], passes=1)
        model.save_draft(tmp_path)
        model.draft_head.base = replace(model.draft_head.base, revision="another")
        model.save_draft(tmp_path / "other")
    with run_gateway(swarm, drafts=[str(tmp_path)]) as running, _client(running) as made:
        wait_until(lambda: any(one["draft"] == "head" for one in done(made, None, max_tokens=64).get("guesses", ())))
        found, expected = (ask(one, temperature=0).choices[0].message.content for one in (made, plain))
        assert found == expected
    with (
        pytest.raises(InvalidOption, match=r"fits none of .* only for the model for which it was trained"),
        run_gateway(swarm, drafts=[str(tmp_path / "other")]),
    ):
        pass


def test_a_draft_with_other_tokens_is_refused(swarm, tmp_path):
    other = zoo.make_checkpoint("llama", tmp_path)
    with pytest.raises(InvalidOption, match=r"--draft .* cannot be loaded"), run_gateway(swarm, drafts=[str(other)]):
        pass
