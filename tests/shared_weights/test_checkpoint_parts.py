"""Which parts of a checkpoint are here, and their digests, which are computed once."""

from __future__ import annotations

import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from swarm.errors import CheckpointError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.manifest import CLIENT, FILES, all_parts
from tests import zoo
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original.source, tmp_path / "model")


def parts_of(folder, kept_in=None) -> CheckpointParts:
    return CheckpointParts(open_checkpoint(folder, name=NAME), kept_in)


def hashed(parts: CheckpointParts) -> int:
    """Bytes that are read to know all manifests."""
    sizes: list[int] = []
    parts.manifests(on_hashed=sizes.append)
    return sum(sizes)


def test_digests_are_kept_for_the_next_process(folder, tmp_path):
    first, second = parts_of(folder, tmp_path / "kept"), parts_of(folder, tmp_path / "kept")
    assert first.known_digests == {}
    assert hashed(first) == first.size_bytes(first.held)
    assert hashed(second) == 0
    assert second.manifests() == first.manifests()
    assert second.known_digests == first.known_digests == first.manifests().digests
    assert second.chunk_digests("0") == first.chunk_digests("0")


def test_digests_are_computed_again_when_a_file_changes(folder, tmp_path):
    path = folder / "model.safetensors"
    before = parts_of(folder, tmp_path / "kept").manifests()
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, path)
    os.utime(path, ns=(1, 1))  # surely another time, where clocks are coarse
    after = parts_of(folder, tmp_path / "kept").manifests()
    assert {part for part in after.parts if after.digests[part] != before.digests[part]} == {"1"}


def test_kept_digests_that_cannot_be_read_are_computed_again(folder, tmp_path):
    expected = parts_of(folder, tmp_path / "kept").manifests()
    for path in (tmp_path / "kept").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert parts_of(folder, tmp_path / "kept").manifests() == expected


def test_shards_with_an_index(tmp_path):
    folder = zoo.make_checkpoint("llama", tmp_path / "model", max_shard_size="40KB")
    whole, checkpoint = parts_of(folder), open_checkpoint(folder)
    assert whole.held == all_parts(checkpoint.blocks)
    last = f"layers.{checkpoint.blocks - 1}."
    for file in {file for name, file in checkpoint.weight_map.items() if last in name}:
        (folder / file).unlink()
    some = parts_of(folder)
    assert FILES in some.held
    assert str(checkpoint.blocks - 1) not in some.held
    for part in some.held:
        assert some.manifest(part) == whole.manifest(part)
    with pytest.raises(CheckpointError, match="not on this machine"):
        some.manifest(str(checkpoint.blocks - 1))


def test_tensors_of_other_towers_do_not_travel(folder):
    tensors = load_file(folder / "model.safetensors")
    extra = tensors["model.norm.weight"]
    others = {f"{one}.weight": extra.clone() for one in ("vision_tower.layers.0.a", "model.visual.a", "mtp.layers.0.a")}
    others[f"model.layers.{BLOCKS}.a.weight"] = extra.clone()
    save_file({**tensors, **others}, folder / "model.safetensors")
    parts = parts_of(folder)
    names = {item.name for part in parts.held if part != FILES for item in parts.manifest(part).items}
    assert names == set(tensors)
    assert {item.name for item in parts.manifest(CLIENT).items} == {name for name in tensors if ".layers." not in name}


def test_a_file_that_vanished_or_was_cut(folder):
    parts = parts_of(folder)
    parts.manifests()
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(CheckpointError, match="have changed since their digests were computed"):
        parts.read(str(BLOCKS - 1), 0, 0)
    path.unlink()
    with pytest.raises(CheckpointError, match="not on this machine"):
        parts.read("0", 0, 0)
