"""Many servers that announce other weights than the model has, against one honest one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.data_structures import ServerInfo
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from tests import zoo
from tests.swarms import TestSwarm, run_client, run_swarm

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
SYBILS = 3


class Sybil(Server):
    """Announces the same wrong digests as all of its kind."""

    def _announcement(self, config: Any) -> ServerInfo:
        honest = super()._announcement(config)
        return replace(honest, digests=("f" * 12,) * len(honest.digests))


def make_sybil(config: ServerConfig) -> Server:
    return Sybil(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    zoo.make_checkpoint("llama", folder, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="module")
def swarm(whole: Path) -> Iterator[TestSwarm]:
    """One honest server, and three that outnumber it."""
    blocks = f"0:{zoo.BLOCKS}"
    with run_swarm(whole, (blocks,)) as running:
        for server in [running.start(blocks, make=make_sybil) for _ in range(SYBILS)]:
            server.wait_ready()
        yield running


def without_blocks(whole: Path, folder: Path) -> Path:
    """The checkpoint with its config, index, embeddings and head, but without the files of blocks: a client's."""
    shutil.copytree(whole, folder)
    checkpoint = open_checkpoint(whole)
    own = {file for name, file in checkpoint.weight_map.items() if checkpoint.is_client_tensor(name)}
    removed = set(checkpoint.weight_map.values()) - own
    assert removed
    for file in removed:
        (folder / file).unlink()
    return folder


@pytest.mark.slow
def test_a_majority_of_servers_does_not_say_which_weights_are_right(swarm, whole, tmp_path):
    """At a254ca2 a client without the blocks' weights went by the majority: it excluded the honest server and used the
    three others, whose wrong weights it could not notice. Now the model's own source decides."""
    folder = without_blocks(whole, tmp_path / "model")
    checkpoint = open_checkpoint(whole)
    right = checkpoint.block_digests(0, checkpoint.blocks)
    assert right is not None
    quoted = ", ".join(f'"{digest}"' for digest in right)
    (folder / "swarm-digests.json").write_text(
        f'{{"format": 1, "model": "model", "revision": "{checkpoint.revision}", "digests": [{quoted}]}}'
    )
    honest = swarm.servers[0].peer_id
    client = TestSwarm(folder, swarm.folder)
    client.servers = swarm.servers
    with run_client(client) as model:
        with model.inference_session(max_length=16):
            told = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert [server.peer_id for server in model.swarm.servers()] == [honest]
    local = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    assert torch.equal(told, local.generate(PROMPT, max_new_tokens=8, do_sample=False))
