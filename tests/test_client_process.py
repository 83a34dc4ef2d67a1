"""A client's process: it forks, ends in the middle of things, writes to a poor terminal, and forgets what it opened."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm.client.model import transformers_hooks
from swarm.errors import NotConnected, SessionClosed
from tests import zoo
from tests.swarms import run_client, run_swarm
from tests.waiting import wait_until

PROMPT = torch.tensor([zoo.PROMPTS[0]])
GREEDY = {"do_sample": False, "eos_token_id": None}

LOADED = """
import gc, multiprocessing, os, sys, threading, torch
from swarm import AutoDistributedModelForCausalLM
model = AutoDistributedModelForCausalLM.from_pretrained(
    sys.argv[1], initial_peers=sys.argv[2].split(","), wire="none", show_route=True
)
ids = torch.tensor([[5, 6, 7]])
def generate():
    return model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0].tolist()
"""

FORKS = """
before = generate()
def child():
    global model
    def opens():
        model.inference_session(max_length=9).open()
    for use in (generate, lambda: model(ids), opens, model.swarm.servers):
        try:
            use()
        except Exception as error:
            print(type(error).__name__, "spawn" in str(error))
    model = None
    gc.collect()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
print(process.exitcode)
if not os.fork():
    sys.exit()
os.wait()
print(generate() == before)
"""

ENDS_WHILE_A_DAEMON_THREAD_GENERATES = """
begun = threading.Event()
def forever():
    while True:
        generate()
        begun.set()
threading.Thread(target=forever, daemon=True).start()
begun.wait()
"""

FORGETS = """
for number in range(3):
    session = model.inference_session(max_length=9)
    session.step(model.word_embeddings(ids))
    cache = model(ids, use_cache=True).past_key_values
del session, cache
gc.collect()
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("process") / "model")
    with run_swarm(folder, ["0:3", "3:6"]) as running:
        yield running


def run(swarm, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOADED + script, swarm.model, ",".join(swarm.addresses)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def test_a_forked_process_says_at_once_that_it_is_not_connected(swarm):
    done = run(swarm, FORKS)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("route:")]
    assert (lines, done.stderr, done.returncode) == (["NotConnected True"] * 4 + ["0", "True"], "", 0)


@pytest.mark.parametrize("script", [ENDS_WHILE_A_DAEMON_THREAD_GENERATES, FORGETS])
def test_a_process_ends_without_a_word(swarm, script):
    done = run(swarm, script)
    assert (done.stderr, done.returncode) == ("", 0)


def test_dropped_sessions_are_closed_at_the_servers(swarm):
    with run_client(swarm) as model:
        session = model.inference_session(max_length=9)
        session.step(model.word_embeddings(PROMPT[:, :3]))
        cache = model(PROMPT[:, :3], use_cache=True).past_key_values
        wait_until(lambda: [len(server.caches()) for server in swarm.servers] == [2, 2])
        del session, cache
        gc.collect()
        wait_until(lambda: not any(server.caches() for server in swarm.servers))


def test_a_closed_model_says_so(swarm):
    with run_client(swarm) as model:
        session = model.inference_session(max_length=20)
        session.step(model.word_embeddings(PROMPT))
        model.swarm.close()
        for use in (
            lambda: model.generate(PROMPT, max_new_tokens=2),
            lambda: model(PROMPT),
            lambda: session.step(model.word_embeddings(PROMPT)),
            model.swarm.servers,
        ):
            with pytest.raises(NotConnected, match=r"closed .*load the model again"):
                use()
        session.close()
        with pytest.raises(SessionClosed):
            session.open()


@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT, of what transformers passes to it
def test_sessions_grow_where_the_caller_set_no_length(swarm, monkeypatch):
    monkeypatch.setattr(transformers_hooks, "DEFAULT_MAX_LENGTH", len(PROMPT[0]))
    local = AutoModelForCausalLM.from_pretrained(swarm.model, dtype=torch.float32)
    expected = local.generate(PROMPT, max_new_tokens=30, **GREEDY)
    with run_client(swarm, local_blocks="0:1") as model:
        tokens, cache = PROMPT, None
        for _ in range(30):
            new = tokens if cache is None else tokens[:, -1:]
            output = model(new, past_key_values=cache, use_cache=True)
            tokens, cache = torch.cat([tokens, output.logits[:, -1:].argmax(-1)], 1), output.past_key_values
        assert tokens.tolist() == expected.tolist()

        prompted = [
            get_peft_model(one, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20))
            for one in (local, model)
        ]
        prompted[1].load_state_dict(
            {name: value for name, value in prompted[0].state_dict().items() if "prompt" in name}, strict=False
        )
        texts = [one.generate(input_ids=PROMPT, max_new_tokens=3, **GREEDY).tolist() for one in prompted]
        assert texts[0] == texts[1]
