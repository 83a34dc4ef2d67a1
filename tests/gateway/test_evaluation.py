"""lm-evaluation-harness on a model in a swarm, from Python and through a gateway: the results of the local model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import lm_eval
import numpy as np
import pytest
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import GatewayProcess
from tests.swarms import TestSwarm, run_client

pytestmark = pytest.mark.slow

SENTENCES = [
    ("Once upon a time there was a poor", " woodcutter who lived with his wife at the edge of a great forest."),
    ("The king had three daughters, and the youngest", " was so beautiful that the sun itself wondered at her."),
    ("When the wolf came to the door, he", " knocked and cried out in a soft voice, Let me in."),
    ("I sat by the fire while Holmes", " smoked his pipe and looked at the letter without a word."),
    ("My fellow citizens, the government of the United", " States"),
    ("What say you, my lord? Shall we", " go to the castle, and speak with the duke of York?"),
    ("The old woman gave the boy a", " golden apple and told him to eat it before the night."),
    ("She opened the window and saw", " a man in a dark coat, who walked slowly down the street."),
    ("We ask the Congress to pass a law", " that gives every man an honest wage for his work."),
    ("The little bird sang in the tree, and", " the prince followed the sound into the wood."),
    ("It was a cold morning in March, and", " the fog lay so thick that we could not see the houses."),
    ("", "The end of the story is that they lived happily until they died."),
]
"""Beginnings and ends. In place of an empty beginning, the harness takes the tokenizer's first token."""

QUESTIONS = [
    {"start": start, "ends": [SENTENCES[number - number % 3 + other][1] for other in range(3)], "right": number % 3}
    for number, (start, _) in enumerate(SENTENCES)
]

TEXTS = ["".join(sentence) for sentence in SENTENCES] + [" ".join("".join(sentence) for sentence in SENTENCES * 5)]
"""The last one has more tokens than the model can read at once, so it is evaluated in two windows."""

TASKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "ends": (
        QUESTIONS,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{start}}",
            "doc_to_choice": "{{ends}}",
            "doc_to_target": "{{right}}",
            "target_delimiter": "",
        },
    ),
    "texts": (
        [{"text": text} for text in TEXTS],
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    ),
}

Numbers = dict[str, Any]
"""The metrics of both tasks, and for each sample its log-likelihoods, and whether the model would write the same."""


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LM], Numbers]:
    folder = tmp_path_factory.mktemp("tasks")
    tasks = []
    for name, (rows, options) in TASKS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        data = {"data_files": {"test": str(path)}, "cache_dir": str(folder)}
        tasks.append({"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **options})
    manager = TaskManager(include_defaults=False)

    def evaluated(model: LM) -> Numbers:
        found: Any = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0)
        numbers = {}
        for name in TASKS:
            numbers |= {key: one for key, one in found["results"][name].items() if isinstance(one, float)}
            numbers |= {f"{name} {one['doc_id']}": np.ravel(one["filtered_resps"]) for one in found["samples"][name]}
        return numbers

    return evaluated


@pytest.fixture(scope="module")
def local(evaluate: Callable[[LM], Numbers]) -> Callable[[int], Numbers]:
    """The results of the model without a swarm, for the number of tokens that it may read at once."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER)
    return cache(lambda length: evaluate(HFLM(model, tokenizer=load_tokenizer(DEMO_FOLDER), max_length=length)))


def assert_same(found: Numbers, expected: Numbers) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) == 5 + len(QUESTIONS) + len(TEXTS)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-3, err_msg=name)


def test_the_numbers_say_something(local):
    """They differ from sample to sample, and with the windows of the long text."""
    numbers = local(1024)
    assert 0 < numbers["acc,none"] < 1
    likelihoods = np.concatenate([numbers[f"ends {number}"].reshape(3, 2) for number in range(len(QUESTIONS))])
    assert len(set(likelihoods[:, 0])) == len(likelihoods)
    assert set(likelihoods[:, 1]) == {0, 1}
    long = f"texts {len(TEXTS) - 1}"
    assert abs(numbers[long] - local(1022)[long]) > 0.1


def test_from_python(swarm: TestSwarm, evaluate, local):
    with run_client(swarm) as model:
        found = evaluate(HFLM(model, tokenizer=load_tokenizer(DEMO_FOLDER), batch_size=4))
    assert_same(found, local(1024))


def test_through_a_gateway(gateway: GatewayProcess, evaluate, local):
    """Two tokens of the context are missing: the harness asks for a new one, and leaves the place of another."""
    address = f"{gateway.api}/completions"
    found = evaluate(LocalCompletionsAPI(address, model="demo", max_length=1024, batch_size=4, num_concurrent=2))
    assert_same(found, local(1022))
