"""Embeddings by OpenAI's client, against those of the model without a swarm."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import openai
import pytest
import torch

from swarm.errors import HubUnreachable
from swarm.generation.prompts import embedding_sequences
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, POOLING_FILE, open_checkpoint
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import run_gateway

TEXTS = ["Once upon a time", "The cat sat on the mat. " * 60, "A"]


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as made:
        yield made


def test_an_embedding_is_the_mean_of_the_last_states_with_length_one(client):
    model, tokenizer = load_local_model(DEMO_FOLDER), load_tokenizer(DEMO_FOLDER)
    reply = client.embeddings.create(model="demo", input=TEXTS)
    assert [one.index for one in reply.data] == [0, 1, 2]
    tokens = [tokenizer(text).input_ids for text in TEXTS]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, tokens))
    for ids, one in zip(tokens, reply.data, strict=True):
        with torch.no_grad():
            states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.float().mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(one.embedding), expected, atol=1e-4, rtol=0)
    as_ids = client.embeddings.create(model="demo", input=tokens, encoding_format="float")
    for one, other in zip(reply.data, as_ids.data, strict=True):
        torch.testing.assert_close(torch.tensor(one.embedding), torch.tensor(other.embedding), atol=1e-4, rtol=0)
    assert client.models.retrieve("demo").swarm["embeddings"] == "mean"


def test_a_model_is_loaded_without_the_hub_but_then_its_embeddings_are_not_known():
    """The file is one more than generating takes: a machine without Internet has everything else."""

    def unreachable(file: str) -> NoReturn:
        raise HubUnreachable(f"the hub does not answer for {file}")

    checkpoint = replace(open_checkpoint(DEMO_FOLDER), fetch=unreachable)
    assert checkpoint.pooling() is None
    served: Any = SimpleNamespace(name="m", pooling=checkpoint.pooling())
    with pytest.raises(HubUnreachable, match="start again"):
        embedding_sequences(served, ["Hi"])


def test_what_cannot_be_embedded_is_refused(client):
    for refused, param in [
        ({"input": []}, "input"),
        ({"input": "x " * 3000}, "input"),
        ({"input": [[99_999]]}, "prompt"),
        ({"dimensions": 8}, "dimensions"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**{"model": "demo", "input": "Hi", **refused})
        assert caught.value.param == param


def test_the_last_state_is_taken_if_the_models_authors_say_so(client, swarm, tmp_path):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "demo")
    (folder / POOLING_FILE).parent.mkdir()
    (folder / POOLING_FILE).write_text(json.dumps({"pooling_mode_lasttoken": True, "word_embedding_dimension": 192}))
    mean = client.embeddings.create(model="demo", input=TEXTS[0]).data[0].embedding
    with run_gateway(swarm, [folder]) as gateway, openai.OpenAI(base_url=gateway.api, api_key="none") as asking:
        assert asking.models.retrieve("demo").swarm["embeddings"] == "last"
        last = torch.tensor(asking.embeddings.create(model="demo", input=TEXTS[0]).data[0].embedding)
        alone = load_tokenizer(DEMO_FOLDER)(TEXTS[0]).input_ids
        with torch.no_grad():
            states = load_local_model(DEMO_FOLDER).base_model(torch.tensor([alone])).last_hidden_state[0]
        torch.testing.assert_close(last, torch.nn.functional.normalize(states[-1].float(), dim=0), atol=1e-4, rtol=0)
        assert not torch.allclose(last, torch.tensor(mean), atol=1e-2)
