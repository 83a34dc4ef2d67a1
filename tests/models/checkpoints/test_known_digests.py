"""Where a client's digests come from, in which order, and what it says if there are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from swarm.errors import DigestFileError, UnknownWeights
from swarm.models.checkpoints import checkpoint as checkpoint_module
from swarm.models.checkpoints import hub_digests
from swarm.models.checkpoints import known_digests as module
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.digest_file import encode_digest_file, read_digest_file, write_digest_file
from swarm.models.checkpoints.known_digests import FILE_BESIDE_CHECKPOINT, known_digests
from tests import zoo
from tests.models.checkpoints.hub import COMMIT, REPOSITORY, run_hub


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of several files."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    zoo.make_checkpoint("llama", folder, max_shard_size="40KB")
    return folder


@pytest.fixture
def weightless(whole, tmp_path) -> Path:
    """The same checkpoint without the files that hold its last block."""
    folder = shutil.copytree(whole, tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {file for name, file in index.items() if f"layers.{zoo.BLOCKS - 1}." in name}:
        (folder / file).unlink()
    return folder


def digests(checkpoint, **options) -> list[str]:
    found = known_digests(checkpoint, **options).by_block
    return [found[block] for block in range(checkpoint.blocks)]


@pytest.fixture
def right(whole) -> list[str]:
    found = open_checkpoint(whole).block_digests(0, zoo.BLOCKS)
    assert found is not None
    return found


def test_a_folder_with_all_weights_needs_nobody(whole, right):
    assert digests(open_checkpoint(whole)) == right


def test_a_folder_without_them_says_what_to_do(weightless):
    with pytest.raises(UnknownWeights, match=r"swarm digest MODEL --output FILE.*--trust-on-first-use"):
        known_digests(open_checkpoint(weightless))


def test_a_file_beside_the_checkpoint(weightless, whole, right):
    revision = open_checkpoint(whole).revision
    write_digest_file(weightless / FILE_BESIDE_CHECKPOINT, encode_digest_file("model", revision, right))
    assert digests(open_checkpoint(weightless)) == right


def test_a_file_that_the_user_names_comes_first(whole, tmp_path):
    checkpoint = open_checkpoint(whole)
    others = ["0" * 12] * zoo.BLOCKS
    write_digest_file(tmp_path / "digests.json", encode_digest_file("model", checkpoint.revision, others))
    assert digests(checkpoint, file=tmp_path / "digests.json") == others


@pytest.mark.parametrize(("revision", "count"), [("folder-000000000000", zoo.BLOCKS), (None, zoo.BLOCKS - 1)])
def test_a_file_for_something_else(whole, tmp_path, revision, count):
    checkpoint = open_checkpoint(whole)
    content = encode_digest_file("model", revision or checkpoint.revision, ["0" * 12] * count)
    write_digest_file(tmp_path / "digests.json", content)
    with pytest.raises(DigestFileError, match="make the file again"):
        known_digests(checkpoint, tmp_path / "digests.json")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 3, "model": "m", "revision": "r", "digests": []}',
        '{"format": 2, "model": "m", "revision": "r", "digests": [], "parts": []}',
        '{"format": 2, "model": "m", "revision": "r", "digests": [], "parts": {"0": "ab"}}',
        f'{{"format": 2, "model": "m", "revision": "r", "digests": [], "parts": {{"../x": "{"0" * 64}"}}}}',
        '{"format": 1, "model": "m", "revision": "r", "digests": ["x"]}',
        '{"format": 1, "model": "m", "revision": "r", "digests": [7]}',
        '{"format": 1, "model": "m", "revision": "r", "digests": {}}',
        "[" * 100_000,
        " " * (1 << 20) + " ",
    ],
)
def test_a_file_that_is_none(tmp_path, content):
    (tmp_path / "digests.json").write_text(content)
    with pytest.raises(DigestFileError, match="is not a usable file of digests"):
        read_digest_file(tmp_path / "digests.json")
    with pytest.raises(DigestFileError, match="No such file"):
        read_digest_file(tmp_path / "nothing.json")


@pytest.fixture
def on_hub(whole, monkeypatch, tmp_path):
    """A model of which only small files are on this machine, and the hub that has all of it."""
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)

    def download(repository, file, revision, cache_dir):
        if not (whole / file).is_file():
            if hub.mode == "broken":
                raise LocalEntryNotFoundError(file)
            raise EntryNotFoundError(file)
        assert not file.endswith(".safetensors")
        return str(shutil.copy(whole / file, snapshot / file))

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
    monkeypatch.setattr(checkpoint_module, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_digests, "RETRY_DELAY_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with run_hub(whole) as hub:
        monkeypatch.setattr(module, "HubFiles", lambda *args: hub_digests.HubFiles(*args, endpoint=hub.endpoint))
        yield hub


def test_of_a_hub_model_only_parts_are_read_and_once(on_hub, right):
    checkpoint = open_checkpoint(REPOSITORY)
    assert checkpoint.revision == COMMIT
    assert digests(checkpoint) == right
    assert on_hub.sent
    on_hub.mode = "broken"
    assert digests(open_checkpoint(REPOSITORY)) == right


def test_a_hub_that_cannot_be_reached_says_what_to_do(on_hub):
    on_hub.mode = "broken"
    with pytest.raises(UnknownWeights, match=r"cannot be reached.*--digests FILE.*trust_on_first_use=True"):
        known_digests(open_checkpoint(REPOSITORY))


def test_a_hub_whose_files_cannot_be_read_in_parts_says_what_to_do(on_hub):
    on_hub.mode = "whole"
    with pytest.raises(UnknownWeights, match=r"does not let parts of files be read.*--digests FILE"):
        known_digests(open_checkpoint(REPOSITORY))


def test_what_was_kept_is_read_again_if_it_is_broken(on_hub, right):
    checkpoint = open_checkpoint(REPOSITORY)
    digests(checkpoint)
    kept = module.kept_path("hub", checkpoint)
    assert kept is not None
    kept.write_text("{")
    assert digests(checkpoint) == right
    assert read_digest_file(kept).digests == tuple(right)
