"""More chats than the servers have room for: all are answered, in turns, and as they would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.gateway.test_openai import MODEL
from tests.gateways import GatewayProcess, run_gateway
from tests.swarms import run_swarm

CHATS = 24
TOKENS = 280
"""Of two portions."""

CACHE = 1024
"""Tokens of each server, of which a gateway gets three quarters: room for two such chats."""


@pytest.fixture(scope="module")
def small() -> Iterator[GatewayProcess]:
    with run_swarm(DEMO_FOLDER, ("0:4", "4:8", "8:12"), cache_tokens=CACHE) as swarm, run_gateway(swarm) as running:
        yield running


def chat(gateway: GatewayProcess, number: int, **more: Any) -> tuple[str, str | None]:
    """A streamed answer, and why it ended."""
    client = openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300)
    messages: Any = [{"role": "user", "content": f"Story {number}: once upon a time"}]
    text, reason = "", None
    with client, client.chat.completions.create(model=MODEL, messages=messages, stream=True, **more) as chunks:
        for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
    return text, reason


@pytest.mark.slow
def test_all_chats_are_answered(small, gateway):
    asked = {"max_tokens": TOKENS, "seed": 7}
    with ThreadPoolExecutor(CHATS) as pool:
        found = list(pool.map(lambda number: chat(small, number, **asked), range(CHATS)))
    assert [reason for _, reason in found] == ["length"] * CHATS
    alone = [chat(gateway, number, **asked) for number in (0, CHATS - 1)]
    assert [found[0], found[-1]] == alone


def test_a_prompt_for_which_servers_are_too_small(small):
    """The message speaks of what the client can change."""
    client = openai.OpenAI(base_url=small.api, api_key="none", max_retries=0)
    with client, pytest.raises(openai.BadRequestError, match="send a shorter prompt") as caught:
        client.completions.create(model=MODEL, prompt=[5] * (CACHE * 4 // 5), max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
