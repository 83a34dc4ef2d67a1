"""Folders that are not quite checkpoints, and how little of a good one is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import nn

from swarm.data_structures import Span
from swarm.errors import CheckpointError, ModelNotFound, UnsupportedModel
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints import checkpoint as checkpoint_module
from swarm.models.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.zoo import make_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    zoo.make_checkpoint("llama", root / "single")
    zoo.make_checkpoint("llama", root / "sharded", max_shard_size="40KB")
    return root


@pytest.fixture
def single(originals, tmp_path) -> Path:
    return shutil.copytree(originals / "single", tmp_path / "single")


@pytest.fixture
def sharded(originals, tmp_path) -> Path:
    return shutil.copytree(originals / "sharded", tmp_path / "sharded")


def load(folder: Path, start: int, end: int):
    return load_span(open_checkpoint(folder), Span(start, end), dtype=torch.float32, device=torch.device("cpu"))


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def files_of(checkpoint: Checkpoint, block: int) -> set[str]:
    return {file for name, file in checkpoint.weight_map.items() if f"layers.{block}." in name}


def test_one_file_and_many_shards_hold_the_same_blocks(single, sharded):
    one, many = open_checkpoint(single), open_checkpoint(sharded)
    assert set(one.weight_map.values()) == {SINGLE_FILE}
    assert len(set(many.weight_map.values())) > 3
    assert one.block_digests(0, zoo.BLOCKS) == many.block_digests(0, zoo.BLOCKS)
    assert load(single, 2, 4).digests == load(sharded, 2, 4).digests == one.block_digests(2, 4)


def test_only_the_shards_of_the_span_are_opened(sharded):
    expected = load(sharded, 2, 3).digests
    checkpoint = open_checkpoint(sharded)
    needed = files_of(checkpoint, 2)
    for number, file in enumerate(sorted(set(checkpoint.weight_map.values()) - needed)):
        if number % 2:
            (sharded / file).unlink()
        else:
            (sharded / file).write_bytes(b"garbage")
    assert load(sharded, 2, 3).digests == expected


def test_a_missing_shard_is_named(sharded):
    file = sorted(files_of(open_checkpoint(sharded), 1))[0]
    (sharded / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        load(sharded, 1, 2)


def test_a_truncated_shard_is_named(sharded):
    file = sorted(files_of(open_checkpoint(sharded), 1))[0]
    (sharded / file).write_bytes((sharded / file).read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{file} is not a readable safetensors file"):
        load(sharded, 1, 2)


def test_no_safetensors(single):
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="has no safetensors weights"):
        load(single, 0, 1)


def test_a_tensor_is_missing(sharded):
    change_index(sharded, lambda files: files.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* such as layers\.1\.mlp\.up_proj\.weight"):
        load(sharded, 1, 2)


def test_tensors_of_another_shape_are_named_with_both_shapes(single):
    config = json.loads((single / "config.json").read_text())
    changed = {**config, "intermediate_size": 40, "vocab_size": 100}
    (single / "config.json").write_text(json.dumps(changed))
    checkpoint = open_checkpoint(single)
    in_block = r"layers\.1\.mlp\.down_proj\.weight has the shape \[32, 48\] .* config\.json describes \[32, 40\]"
    with pytest.raises(CheckpointError, match=f"block 1 cannot be loaded: {in_block}"):
        load(single, 1, 2)
    at_client = r"^lm_head\.weight has the shape \[128, 32\] .* config\.json describes \[100, 32\]"
    with pytest.raises(CheckpointError, match=at_client):
        load_blockless_model(checkpoint, nn.Identity(), type("Mixin", (), {}), dtype=torch.float32)


def test_weights_packed_in_a_way_that_is_not_read(single):
    """It is said before anything is joined or loaded."""
    config = json.loads((single / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm", "nbits_per_codebook": 16}
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="packed by 'aqlm', which is not read here; use the model's checkpoint"):
        open_checkpoint(single)


@pytest.mark.parametrize("form", ["load_in_4bit", "load_in_8bit"])
def test_a_config_that_calls_plain_weights_quantized(single, form):
    """The first step failed with an assertion of bitsandbytes, or computed with other weights than the digest's."""
    pytest.importorskip("bitsandbytes", reason="without it, they cannot be loaded anyway")
    config = json.loads((single / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", form: True}
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="stored as they are"):
        load(single, 1, 2)


@pytest.mark.parametrize("escape", ["../outside.safetensors", "{parent}/outside.safetensors", "../single/..", ".."])
def test_the_index_cannot_lead_outside_of_the_folder(sharded, single, escape):
    """Not even to a file that would do."""
    shutil.copy(single / SINGLE_FILE, sharded.parent / "outside.safetensors")
    change_index(sharded, lambda files: files.update(dict.fromkeys(files, escape.format(parent=sharded.parent))))
    checkpoint = open_checkpoint(sharded)
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file"):
        checkpoint.block_digests(0, 1)


def test_the_index_cannot_name_pickled_weights(sharded):
    change_index(sharded, lambda files: files.update(dict.fromkeys(files, "pytorch_model.bin")))
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file"):
        load(sharded, 0, 1)


def test_an_index_that_is_none(sharded):
    for content in [
        *("", "[]", "{}", "\xff", "[" * 10**5, '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": ["ab"]}'),
        *('{"weight_map": {"a": 1}}', '{"weight_map": {"a": ".safetensors\\u0000"}}'),
        *('{"weight_map": [[5, "a.safetensors"]]}', '{"weight_map": {"a": "%s.safetensors"}}' % ("a" * 300)),
    ]:
        (sharded / INDEX_FILE).write_bytes(content.encode("latin-1"))
        with pytest.raises(CheckpointError):
            load(sharded, 0, 1)


@pytest.mark.parametrize("name", ["." * 10**6, "model." * 10**5, "model.layers.0." + "a." * 10**5])
def test_names_of_tensors_that_take_for_ever_to_match(sharded, single, name):
    """They were matched by a regular expression from each of their characters on."""
    change_index(sharded, lambda files: files.update({name: next(iter(files.values()))}))
    save_file({name: torch.ones(1)}, single / SINGLE_FILE)
    for folder in (sharded, single):
        with pytest.raises(CheckpointError, match="name of"):
            load(folder, 0, 1)


@pytest.mark.parametrize("file", [INDEX_FILE, "generation_config.json"])
def test_files_that_would_fill_the_memory_are_not_read(sharded, file):
    checkpoint = open_checkpoint(sharded)
    with (sharded / file).open("wb") as huge:
        huge.truncate(1 << 40)  # which takes no room on the drive
    with pytest.raises(CheckpointError, match="larger than"):
        _ = checkpoint.weight_map, checkpoint.generation_config()
    if file == INDEX_FILE:
        with pytest.raises(ModelNotFound, match="larger than"):
            open_checkpoint(sharded)


def test_a_config_that_is_none(single):
    for content in ["", "[]", "7", "{}", '{"model_type": "llama", "hidden_size": "wide"}', "\xff"]:
        (single / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelNotFound, match=r"config\.json"):
            open_checkpoint(single)


def test_a_config_cannot_bring_its_own_code(single):
    (single / "modeling.py").write_text("raise SystemExit('this code ran')")
    config = {"model_type": "novel", "auto_map": {"AutoConfig": "modeling.NovelConfig"}}
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="never runs a repository's code"):
        open_checkpoint(single)


def test_an_unknown_name_while_the_hub_cannot_be_reached(monkeypatch):
    def download(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
    with pytest.raises(ModelNotFound, match="cannot be reached: no connection"):
        open_checkpoint("somebody/model")


def test_the_hub_is_asked_for_one_commit_only(single, monkeypatch, tmp_path):
    """A branch may move while a server loads; all files come from the commit that the config came from."""
    snapshot = shutil.copytree(single, tmp_path / "snapshots" / "c0ffee")
    asked = []

    def download(repository, file, revision, cache_dir):
        asked.append(revision)
        return str(snapshot / file)

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
    checkpoint = open_checkpoint("somebody/model", revision="main")
    checkpoint.fetch(SINGLE_FILE)
    assert checkpoint.revision == "c0ffee"
    assert asked[0] == "main"
    assert asked[-1] == "c0ffee"


def test_where_a_tensor_belongs(tmp_path):
    for family, name, place, head in [
        ("llama", "model.layers.3.mlp.up_proj.weight", (3, "mlp.up_proj.weight"), False),
        ("llama", "layers.0.input_layernorm.weight", (0, "input_layernorm.weight"), False),
        ("llama", "language_model.model.layers.5.mlp.weight", (5, "mlp.weight"), False),
        ("opt", "model.decoder.layers.1.fc1.bias", (1, "fc1.bias"), False),
        ("gpt2", "transformer.h.2.mlp.c_fc.weight", (2, "mlp.c_fc.weight"), False),
        ("llama", "model.layers.6.eh_proj.weight", None, False),  # behind the last block: predicts further tokens
        ("llama", "vision_tower.encoder.layers.0.mlp.weight", None, False),
        ("llama", "model.embed_tokens.weight", None, True),
        ("llama", "model.norm.weight", None, True),
        ("gpt2", "lm_head.weight", None, True),
        ("opt", "model.decoder.embed_positions.weight", None, True),
    ]:
        checkpoint = open_checkpoint(make_checkpoint(family, tmp_path))
        assert checkpoint.locate(name) == place
        assert checkpoint.is_client_tensor(name) == head


def test_generation_settings_that_no_request_could_use(single):
    """They were taken, and each request to the model failed as if the gateway had a bug."""
    for value in ["x", "", {"a": 1}, [["a"]], ["x"], [0.5], 1e300, float("nan"), -2, 10**30, True]:
        for name in ["temperature", "top_p", "top_k", "eos_token_id", "bos_token_id", "pad_token_id"]:
            (single / "generation_config.json").write_text(json.dumps({name: value}))
            with pytest.raises(CheckpointError, match=r"generation_config\.json"):
                open_checkpoint(single).generation_config()


def test_an_unsupported_family_is_refused_before_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModel, match="'t5'"):
        open_checkpoint(tmp_path)


def test_soft_caps_are_never_left_out(tmp_path):
    """Whatever the family's class says that it can compute with."""
    assert open_checkpoint(make_checkpoint("gemma2", tmp_path)).config._attn_implementation == "eager"
