"""A checkpoint whose config.json names no dtype is computed in the one that transformers takes from its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm.models.checkpoints import checkpoint as checkpoint_module
from swarm.models.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, open_checkpoint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.wire_defaults import default_wire_format
from swarm.shared_weights.json_files import offered_files
from tests import zoo
from tests.models.checkpoints.hub import COMMIT, REPOSITORY, run_hub
from tests.swarms import run_client, run_swarm


def save_unnamed(folder: Path, dtype: torch.dtype, max_shard_size: str = "1GB") -> Path:
    zoo.make_model("llama").to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    change_json(folder / "config.json", lambda config: config.pop("dtype"))
    return folder


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def of_transformers(folder: Path) -> torch.dtype:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype


def ours(folder: Path) -> torch.dtype:
    return resolve_dtype("auto", open_checkpoint(folder).config)


def test_a_swarm_computes_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    folder = save_unnamed(tmp_path / "model", torch.bfloat16)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with run_swarm(folder, ["0:3", "3:6"]) as swarm, run_client(swarm) as model:
        assert zoo.greedy_texts(model) == zoo.greedy_texts(local)
        assert {server.compute_dtype for server in model.swarm.servers()} == {"bfloat16"}
        assert model.get_input_embeddings().weight.dtype == model.lm_head.weight.dtype == torch.bfloat16


def test_the_weight_that_decides_is_the_one_that_transformers_looks_at(tmp_path: Path) -> None:
    single = save_unnamed(tmp_path / "single", torch.bfloat16)
    assert ours(single) == of_transformers(single) == torch.bfloat16
    weights = load_file(single / SINGLE_FILE)
    save_file(
        {**weights, "a": torch.zeros(1, dtype=torch.int8), min(weights): weights[min(weights)].half()},
        single / SINGLE_FILE,
    )
    assert ours(single) == of_transformers(single) == torch.float16

    sharded = save_unnamed(tmp_path / "sharded", torch.bfloat16, "20KB")
    last = max(json.loads((sharded / INDEX_FILE).read_text())["weight_map"].values())
    save_file({name: one.float() for name, one in load_file(sharded / last).items()}, sharded / last)
    assert ours(sharded) == of_transformers(sharded) == torch.bfloat16
    change_json(sharded / INDEX_FILE, lambda index: index["metadata"].update(dtype="float16"))
    assert ours(sharded) == of_transformers(sharded) == torch.float16
    assert str(default_wire_format(open_checkpoint(sharded).config, trains=True)) == "float16"
    change_json(sharded / "config.json", lambda config: config.update(torch_dtype="float32"))
    assert ours(sharded) == of_transformers(sharded) == torch.float32


def test_peers_that_get_the_weights_learn_the_dtype(tmp_path: Path) -> None:
    """They may get blocks whose dtype is another, and a file offered once must stay the same when it is passed on."""
    folder = save_unnamed(tmp_path / "model", torch.bfloat16)
    offered = offered_files(open_checkpoint(folder))["config.json"]
    assert json.loads(offered)["dtype"] == "bfloat16"
    (folder / "config.json").write_bytes(offered)
    assert offered_files(open_checkpoint(folder))["config.json"] == offered


def test_of_a_shard_on_the_hub_no_more_than_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, snapshot = save_unnamed(tmp_path / "model", torch.bfloat16, "20KB"), tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)

    def download(repository: str, file: str, **options: object) -> str:
        assert not file.endswith(".safetensors")
        if not (folder / file).is_file():
            raise EntryNotFoundError(file)
        return str(shutil.copy(folder / file, snapshot / file))

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
    monkeypatch.setattr(checkpoint_module, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with run_hub(folder) as hub:
        monkeypatch.setattr(checkpoint_module, "HfApi", lambda: HfApi(endpoint=hub.endpoint))
        assert open_checkpoint(REPOSITORY).config.dtype == torch.bfloat16
        assert [file for file, _ in hub.sent] == [min(path.name for path in folder.glob("*.safetensors"))]
