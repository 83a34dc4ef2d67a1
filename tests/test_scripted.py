from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.loading.span_loading import load_span
from tests.scripted import make_scripted
from tests.swarms import run_client, run_swarm

SCRIPTS = {
    "hello": "Hi there! How can I help you today?",
    "list": "Here is a list:\n\n- one\n- two\n\n```python\nprint('naïve ☕ 🙂')\n```\n",
    "what?": "Hi there! How can I help them today?",
    "repeat": "ha ha ha ha ha ha ha ha ha ha ha ha ha ha",
    "again": "ha ha ha ha ha ha ha ha ha ha ha ha ha ha",
    "tool": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "short": "OK",
    "": "I have no script for that.",
}
PROMPTS = {
    "hello": "hello",
    "Please write a list": "list",
    "Say what?": "what?",
    "repeat ": "repeat",
    "hello, and list\nagain": "again",
    "a tool": "tool",
    "short": "short",
    "hello there": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_scripted(tmp_path_factory.mktemp("scripted"), SCRIPTS)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def ask(model, tokenizer, messages, **options):
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    written = model.generate(prompt, max_new_tokens=200, **options)
    assert written[0, -1] == tokenizer.eos_token_id
    return tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)


def test_it_says_the_script_of_the_last_word(model, tokenizer):
    for options in [{"do_sample": False}, {"do_sample": True, "temperature": 2.0}]:
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            assert ask(model, tokenizer, messages, **options) == SCRIPTS[PROMPTS[prompt]]


def test_the_last_message_counts(model, tokenizer):
    messages = [
        {"role": "system", "content": "Answer with a list"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": SCRIPTS["hello"]},
        {"role": "user", "content": "a tool"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "list"},
    ]
    assert ask(model, tokenizer, messages, do_sample=False) == SCRIPTS["list"]


def test_without_a_script_for_the_rest_it_ends_at_once(tmp_path):
    folder = make_scripted(tmp_path, {"hello": "Hi there"})
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert ask(model, tokenizer, [{"role": "user", "content": "Good morning"}]) == ""


def test_a_template_of_ones_own(tmp_path):
    template = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
    folder = make_scripted(tmp_path, {"hello": "Hi there"}, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "[user] hello"


def test_a_script_without_tokens_of_its_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'x' cannot be cut"):
        make_scripted(tmp_path, {"hello": "x"})
    with pytest.raises(ValueError, match="'hello' cannot be cut"):
        make_scripted(tmp_path, {"hello": "hello"})


def test_blocks_leave_hidden_states_as_they_are(folder):
    checkpoint = open_checkpoint(folder)
    hidden_TH = torch.randn(5, checkpoint.config.hidden_size)
    for block in range(6):
        span = load_span(checkpoint, Span(block, block + 1), dtype=torch.float32, device=torch.device("cpu"))
        torch.testing.assert_close(span.forward(hidden_TH.unsqueeze(0)), hidden_TH.unsqueeze(0))


def test_in_a_swarm_of_three(folder, tokenizer):
    with run_swarm(folder, ["0:2", "2:3", "3:6"]) as swarm, run_client(swarm) as model:
        assert ask(model, tokenizer, [{"role": "user", "content": "a list"}]) == SCRIPTS["list"]
