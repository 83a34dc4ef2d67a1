"""Prompts that are made in another process, and what ends there and not here."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.tokenizers import prompt_process
from swarm.models.tokenizers.chat_template import TemplateOptions, conversation_tokens, text_tokens
from swarm.models.tokenizers.prompt_process import PromptProcess
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.models.tokenizers.hostile import ENDLESS, EXPONENTIAL_TEXT, HUGE, exponential, save_tokenizer
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "Hello"}]
STRANGE = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% elif messages[0].content == 'huge' %}" + HUGE
TEMPLATE = STRANGE + (
    "{% endif %}{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=TEMPLATE)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[PromptProcess]:
    with closing(PromptProcess(str(folder))) as running:
        running.require_loaded()
        yield running


def test_prompts_are_those_that_the_tokenizer_makes_here(folder, process):
    tokenizer = load_tokenizer(folder)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None, True]}}}]
    talk = [*HELLO, {"role": "assistant", "content": "Hi \U0001f600 \u2028"}, {"role": "user", "content": ""}]
    for messages, offered in ((HELLO, None), (talk, tools), (talk, []), (HELLO * 50, tools)):
        assert process.conversation(messages, offered) == conversation_tokens(tokenizer, messages, offered)
        options = TemplateOptions(opens_answer=False)
        assert process.conversation(messages, None, options) == conversation_tokens(tokenizer, messages, None, options)
    for text in ("", "Once upon a time", "naïve café\n\0 日本", "x" * 100_000):
        assert process.text(text) == text_tokens(tokenizer, text)


@pytest.mark.parametrize("half", ["\ud800", "a\udce9"])
def test_half_of_a_surrogate_pair_is_refused_as_such(process, half):
    tools = [{"type": "function", "function": {"name": "f", "description": half}}]
    for make in (
        lambda: process.text(half),
        lambda: process.conversation([{"role": "user", "content": half}]),
        lambda: process.conversation(HELLO, tools),
    ):
        with pytest.raises(ChatTemplateError, match="has half of a surrogate pair"):
            make()


def test_it_starts_again_when_something_has_ended_it(process):
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.text("Once upon") == process.text("Once upon")


def test_an_interrupted_prompt_is_not_taken_for_the_next_one(process, monkeypatch):
    expected = process.text("Once upon a time")

    def interrupted(timeout_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.text("The king")
    assert process.text("Once upon a time") == expected


def test_closing_ends_what_is_being_made(folder):
    """Without this, a gateway could not end before an endless template has used up its time."""
    process = PromptProcess(str(folder))
    process.require_loaded()
    worker = psutil.Process(process._process.pid)
    used = worker.cpu_times().user
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.conversation, [{"role": "user", "content": "loop"}])
        wait_until(lambda: worker.cpu_times().user > used + 0.1)
        process.close()
        with pytest.raises(ChatTemplateError):
            asked.result()
    assert not worker.is_running()
    with pytest.raises(CheckpointError, match="is closed"):
        process.conversation(HELLO)


def test_a_process_that_could_not_load_again_is_started_once_more(folder, tmp_path):
    """As when the machine's memory is full for a while."""
    moved = tmp_path / "model"
    shutil.copytree(folder, moved)
    with closing(PromptProcess(str(moved))) as running:
        tokens = running.text("Once upon")
        moved.rename(tmp_path / "away")
        running._process.kill()
        running._process.wait()
        (moved / "none").mkdir(parents=True)
        for _ in range(2):
            with pytest.raises(CheckpointError):
                running.text("Once upon")
        shutil.rmtree(moved)
        (tmp_path / "away").rename(moved)
        assert running.text("Once upon") == tokens


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptProcess]:
    """A process with a tokenizer and a template that can be made to run for ever."""
    folder = save_tokenizer(tmp_path_factory.mktemp("exponential"), exponential, TEMPLATE)
    with closing(PromptProcess(str(folder))) as running:
        running.require_loaded()
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("said", ["loop", "huge", EXPONENTIAL_TEXT], ids=["endless", "huge", "exponential"])
def test_what_takes_too_long_or_too_much_is_ended_and_others_are_answered(strict, said):
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(strict.conversation, [{"role": "user", "content": said}])
        good = pool.submit(strict.conversation, HELLO)
        with pytest.raises(ChatTemplateError, match=r"more than 10 s or 1024 MiB|MemoryError"):
            bad.result()
        assert len(good.result()) > 1


def test_a_template_that_takes_all_memory(tmp_path):
    with closing(PromptProcess(str(save_tokenizer(tmp_path, template=HUGE)))) as running:
        running.require_loaded()
        with pytest.raises(ChatTemplateError):
            running.conversation(HELLO)
        assert running.text("Once upon")


def test_its_limits_end_it(folder, monkeypatch):
    """Without this process, too: it may have been killed."""
    monkeypatch.setattr(prompt_process, "PROMPT_TIMEOUT_S", 0.5)
    with closing(PromptProcess(str(folder))) as running:
        running.require_loaded()
        first = psutil.Process(running._process.pid)
        with pytest.raises(ChatTemplateError, match="needs more than"):
            running.conversation([{"role": "user", "content": "loop"}])
        assert not first.is_running()
        assert running.text("Once upon")
