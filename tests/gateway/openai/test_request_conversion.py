"""From requests to sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.request_conversion import completion_request_sequences
from swarm.gateway.openai.request_schema import CompletionRequest
from swarm.gateway.settings import GatewaySettings
from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.prompts import DEFAULT_COMPLETION_TOKENS, prompt_texts
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.prompt_process import TokenizerPrompts
from swarm.models.tokenizers.tokenizer import load_tokenizer

CONTEXT = 32


@pytest.fixture(scope="module")
def served() -> Any:
    usual = SimpleNamespace(temperature=None, top_p=None, top_k=None)
    tokenizer = load_tokenizer(DEMO_FOLDER)
    model = SimpleNamespace(generation_config=usual)
    prompts = TokenizerPrompts(tokenizer)
    return SimpleNamespace(
        name="m", tokenizer=tokenizer, prompts=prompts, model=model, context_length=CONTEXT, vocabulary_size=1000
    )


@pytest.mark.parametrize(("prompt", "room"), [(4, DEFAULT_COMPLETION_TOKENS), (CONTEXT - 3, 3)])
def test_the_default_limit_fits_the_context(served, prompt, room):
    (work,) = completion_request_sequences(CompletionRequest(model="m", prompt=[5] * prompt), served, GatewaySettings())
    assert work.max_tokens == room


def test_a_limit_beyond_the_context_is_an_error(served):
    with pytest.raises(InvalidGenerationRequest, match="room for 3 more; 4 were requested"):
        completion_request_sequences(
            CompletionRequest(model="m", prompt=[5] * (CONTEXT - 3), max_tokens=4), served, GatewaySettings()
        )


def test_the_prompt_is_repeated_for_each_answer(served):
    works = completion_request_sequences(
        CompletionRequest(model="m", prompt=["Once", "upon a"], n=2), served, GatewaySettings()
    )
    assert prompt_texts(works, served) == ["Once", "Once", "upon a", "upon a"]


def test_the_number_of_texts_of_a_request_is_limited(served):
    assert (
        len(
            completion_request_sequences(
                CompletionRequest(model="m", prompt=["Once"] * 4, n=2), served, GatewaySettings()
            )
        )
        == 8
    )
    with pytest.raises(BadRequest, match="prompts times n are 9 texts; one request may have 8 at most"):
        completion_request_sequences(CompletionRequest(model="m", prompt=["Once"] * 3, n=3), served, GatewaySettings())
