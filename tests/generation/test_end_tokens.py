"""A text ends with the tokenizer's end token too, wherever it is generated, over real servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import run_gateway
from tests.scripted import END, make_scripted
from tests.swarms import TestSwarm, run_client, run_swarm

HELLO = "Good day to you."
OTHER = "<|user|>"
"""What the generation settings name as the end; the model never says it."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestSwarm]:
    folder = make_scripted(tmp_path_factory.mktemp("one") / "parrot", {"hello": HELLO, "": "On and on and on."})
    edit(folder / "generation_config.json", lambda settings: settings.update(eos_token_id=token(folder, OTHER)))
    with run_swarm(folder, ("0:3", "3:6")) as running:
        yield running


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def token(folder: Path | str, name: str) -> int:
    return int(load_tokenizer(folder).convert_tokens_to_ids(name))


def test_the_gateway_and_swarm_chat_stop(swarm: TestSwarm) -> None:
    with run_gateway(swarm) as gateway:
        asked = {"model": "parrot", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}
        choice = httpx.post(f"{gateway.api}/chat/completions", json=asked, timeout=300).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (HELLO, "stop")
    command = [sys.executable, "-m", "swarm.cli", "chat", swarm.model, "--initial-peers", swarm.address]
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == f"{HELLO}\n", done.stderr


def named_in_the_config(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["added_tokens_decoder"] = {str(token(folder, END)): {"content": END, "special": True}}
        config["eos_token"] = {"content": END, "__type": "AddedToken"}

    edit(folder / "tokenizer_config.json", change)
    (folder / "tokenizer.json").unlink()


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"[" * 100_000)


def beyond_the_vocabulary(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda file: file.update(added_tokens=[{"content": END, "id": 10**6}]))


@pytest.mark.parametrize("change", [None, named_in_the_config, without_tokenizer, broken, beyond_the_vocabulary])
def test_generate_stops_where_transformers_does(
    swarm: TestSwarm, tmp_path: Path, change: Callable[[Path], None] | None
) -> None:
    folder = tmp_path / "parrot"
    shutil.copytree(swarm.model, folder)
    if change is not None:
        change(folder)
    is_named = change in (None, named_in_the_config)
    ends = [token(swarm.model, OTHER), *([token(swarm.model, END)] if is_named else [])]
    tokens = torch.tensor([[token(swarm.model, name)] for name in ("hello", "A")])
    arguments = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 40, "do_sample": False}
    local = load_local_model(swarm.model)
    expected = local.generate(tokens, **arguments, eos_token_id=ends)
    on_and_on = local.generate(tokens, **arguments)
    swarm_of_folder = TestSwarm(folder, swarm.folder)
    swarm_of_folder.servers = swarm.servers
    with run_client(swarm_of_folder) as model:
        assert model.generation_config.eos_token_id == (ends if is_named else ends[0])
        assert model.generate(tokens, **arguments).tolist() == expected.tolist()
        assert model.generate(tokens, **arguments, lanes=2).tolist() == expected.tolist()
        own = model.generate(tokens, **arguments, eos_token_id=ends[:1])
        assert own.tolist() == on_and_on.tolist()
    assert (expected.shape[1] < on_and_on.shape[1]) == is_named
