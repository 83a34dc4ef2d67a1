"""Prompts that are computed once, over HTTP: the next request of the same key computes only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from swarm.gateway.api_keys import KeyLimits, add_key
from swarm.gateway.settings import GatewaySettings
from tests.gateway.test_openai import MODEL
from tests.gateways import GatewayProcess, metric_at, run_gateway
from tests.swarms import TestSwarm

STORY = "Once upon a time there was a girl who lived in a house with a red door. " * 8


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A key file, and its two keys."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return file, [add_key(file, name, KeyLimits()) for name in ("one", "other")]


@pytest.fixture(scope="module")
def gateway(swarm: TestSwarm, keys: tuple[Path, list[str]]) -> Iterator[GatewayProcess]:
    with run_gateway(swarm, keys=keys[0], settings=GatewaySettings(public_status=True)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(swarm: TestSwarm) -> Iterator[GatewayProcess]:
    """One that keeps nothing."""
    with run_gateway(swarm, settings=GatewaySettings(prefix_memory=0)) as running:
        yield running


def client(gateway: GatewayProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.api, api_key=key, max_retries=0, timeout=300)


def say(who: openai.OpenAI, *texts: str, **more: Any) -> tuple[list[str], int]:
    """The answers to a conversation, and how many tokens of it had been computed before."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0, **more}
    reply = who.chat.completions.create(messages=messages, **asked)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return [choice.message.content or "" for choice in reply.choices], reply.usage.prompt_tokens_details.cached_tokens


def test_a_conversation(gateway, plain, keys):
    """Three turns: of each, what was said before is there. What is said is what a gateway says that keeps nothing."""
    own, other, nothing = client(gateway, keys[1][0]), client(gateway, keys[1][1]), client(plain)
    before, texts = gateway.metric("swarm_gateway_cached_tokens_total"), [STORY]
    (answer,), cached = say(own, *texts)
    assert (say(nothing, *texts), cached) == (([answer], 0), 0)
    known = 0
    for _ in range(2):
        texts += [answer, "Tell me more. " * 5]
        (answer,), cached = say(own, *texts)
        assert cached > max(known, 100)
        known = cached
        assert say(nothing, *texts) == ([answer], 0)
        assert say(other, *texts)[0] == [answer]
    assert gateway.metric("swarm_gateway_cached_tokens_total") - before > known


def test_another_key_finds_nothing(gateway, keys):
    own, other = (client(gateway, key) for key in keys[1])
    text = "A secret of the first key. " * 10
    assert say(own, text)[1] == 0
    assert say(other, text)[1] == 0
    assert say(own, text)[1] > 50


def test_other_answers_and_edited_questions(gateway, keys):
    own = client(gateway, keys[1][0])
    question = "Why is the sky so blue today? " * 10
    first, _ = say(own, question)
    again, cached = say(own, question)
    assert (again, cached > 60) == (first, True)
    assert say(own, question + "And why is it red in the evening?")[1] > 60


def test_of_many_answers_the_prompt_is_computed_once(gateway, plain, keys, swarm):
    """All but the first begin with a copy, so servers compute the prompt's tokens once. Answers are as without."""
    own, nothing = client(gateway, keys[1][0]), client(plain)
    settings = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    text = "Four little children went for a walk. " * 12

    def computed() -> float:
        return metric_at(swarm.servers[0].metrics_url, "swarm_server_tokens_total")

    before = computed()
    answers, cached = say(own, text, **settings)
    shared, before = computed() - before, computed()
    assert (answers, cached) == (say(nothing, text, **settings)[0], 0)
    assert computed() - before < 2 * shared  # which computes it once for its four answers, too
    assert say(own, text, **settings) == (answers, pytest.approx(cached, abs=1000))


def test_the_end_of_a_stream_says_it_too(gateway, keys):
    own, text = client(gateway, keys[1][0]), "Streams of words. " * 20
    for _ in range(2):
        chunks = list(
            own.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text}],
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 60
