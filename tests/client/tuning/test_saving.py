"""What is written, and uploaded to a hub that only writes down what it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from swarm.client.tuning import saving
from swarm.client.tuning.lora import lora_settings, new_lora, select_targets
from swarm.client.tuning.saving import TrainedSnapshot, peft_config, push, save
from swarm.models.adapters.adapter_files import read_adapter
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.cutting.model_inspection import find_lora_targets
from tests.zoo import BLOCKS, make_checkpoint

HEAD = {"score.weight": torch.arange(96.0).view(3, 32)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))


def lora(checkpoint: Checkpoint, heads: Mapping[str, torch.Tensor] | None = None, **entries: Any) -> TrainedSnapshot:
    settings = lora_settings({"init_lora_weights": False, **entries})
    modules = select_targets(settings, find_lora_targets(checkpoint.config), "model.layers", "llama")
    made = new_lora(modules, settings, "model.layers")
    return TrainedSnapshot(checkpoint, "lora", "model.layers", None, None, made, heads or {})


def prompts(
    checkpoint: Checkpoint, deep: bool = False, heads: Mapping[str, torch.Tensor] | None = None
) -> TrainedSnapshot:
    method = "deep_ptune" if deep else "ptune"
    everywhere = torch.randn(BLOCKS, 4, 32) if deep else None
    return TrainedSnapshot(checkpoint, method, "model.layers", torch.randn(4, 32), everywhere, None, heads or {})


def snapshots(checkpoint: Checkpoint) -> dict[str, TrainedSnapshot]:
    return {
        "lora": lora(checkpoint),
        "lora with a head": lora(checkpoint, HEAD),
        "some blocks": lora(checkpoint, layers_to_transform=[1, 4], rank_pattern={"4.self_attn.q_proj": 3}),
        "patterns": lora(checkpoint, rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 32}, use_rslora=True),
        "prompts": prompts(checkpoint),
        "prompts with a head": prompts(checkpoint, heads=HEAD),
        "deep prompts": prompts(checkpoint, deep=True),
        "deep prompts with a head": prompts(checkpoint, deep=True, heads=HEAD),
        "head": TrainedSnapshot(checkpoint, "head", "model.layers", None, None, None, HEAD),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("lora with a head", "some blocks", "patterns", "prompts with a head", "deep prompts", "head"),
    ],
)
def test_saved_adapters_are_read_back(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    snapshot = snapshots(checkpoint)[name]
    save(snapshot, tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = read_adapter(tmp_path / "new" / "folder", checkpoint)
    assert found.config.method == snapshot.method
    assert found.config.task_type == snapshot.task
    for mine, theirs in ((snapshot.prompts, found.prompts), (snapshot.deep_prompts, found.deep_prompts)):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    assert {key: value.tolist() for key, value in found.heads.items()} == {
        key: value.tolist() for key, value in snapshot.heads.items()
    }
    factors = {(block, module): one for block in found.lora for module, one in found.lora[block].items()}
    if snapshot.lora is None:
        assert not factors
        return
    expected = {(block, module): one for block in snapshot.lora for module, one in snapshot.lora[block].items()}
    assert set(factors) == set(expected)
    for place, one in expected.items():
        assert torch.equal(factors[place].down, one.lora_A)
        assert torch.equal(factors[place].up, one.lora_B)
        assert factors[place].scaling == one.scaling


def test_modules_are_named_briefly_where_all_blocks_have_them(checkpoint: Checkpoint) -> None:
    config = peft_config(lora(checkpoint, rank_pattern={"v_proj": 2}))
    assert config["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert sorted({config["r"], *config["rank_pattern"].values()}) == [2, 8]
    some = peft_config(lora(checkpoint, target_modules=["q_proj"], layers_to_transform=[1, 4]))
    assert some["target_modules"] == ["model.layers.1.self_attn.q_proj", "model.layers.4.self_attn.q_proj"]


def test_no_path_of_this_machine_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save(lora(checkpoint), tmp_path)
    written = (tmp_path / "adapter_config.json").read_text() + (tmp_path / "README.md").read_text()
    assert str(Path(checkpoint.source).parent) not in written
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "llama"


@pytest.mark.parametrize(
    ("name", "library", "tag", "task"),
    [
        ("lora", "peft", "lora", "text-generation"),
        ("prompts with a head", "peft", "prompt-tuning", "text-classification"),
        ("deep prompts", "swarm", "deep-prompt-tuning", "text-generation"),
        ("head", "swarm", "linear-probing", "text-classification"),
    ],
)
def test_the_model_card_has_the_tags_by_which_it_is_found(
    name: str, library: str, tag: str, task: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    save(snapshots(checkpoint)[name], tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "llama"
    assert card.data.library_name == library
    assert card.data.pipeline_tag == task
    assert {tag, "swarm", "base_model:adapter:llama", f"base_model_revision:{checkpoint.revision}"} <= set(
        card.data.tags
    )
    assert ("PeftModel" in card.text) == (library == "peft")


def test_the_hub_gets_the_same_files(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    class Hub:
        def __init__(self, token: Any) -> None:
            asked.append(("token", token))

        def create_repo(self, name: str, **options: Any) -> Any:
            asked.append(("create", (name, options)))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, folder_path: str, **options: Any) -> Any:
            asked.append(("upload", options))
            asked.append(("files", {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}))
            return SimpleNamespace(commit_url="https://hub.example/commit")

    monkeypatch.setattr(saving, "HfApi", Hub)
    snapshot = prompts(checkpoint)
    assert push(snapshot, "mine", private=True, token="secret", revision="dev") == "https://hub.example/commit"
    save(snapshot, tmp_path)
    calls = dict(asked)
    assert calls["token"] == "secret"
    assert calls["create"] == ("mine", {"private": True, "exist_ok": True})
    assert calls["upload"]["repo_id"] == "me/mine"
    assert calls["upload"]["revision"] == "dev"
    assert calls["files"] == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
