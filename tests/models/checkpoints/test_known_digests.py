"""Where a client's digests come from, in which order, and what it says if there are none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import DigestFileError, HubUnreachable, UnknownWeights
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import (
    FILE_BESIDE_CHECKPOINT,
    encode_digest_file,
    known_digests,
    read_digest_file,
    write_digest_file,
)
from tests import zoo


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


def test_a_folder_without_them_says_what_to_do(weightless):
    with pytest.raises(UnknownWeights, match=r"swarm digest MODEL > FILE.*--digests FILE"):
        known_digests(open_checkpoint(weightless))


def test_a_file_that_the_user_names_comes_first(whole, tmp_path):
    checkpoint = open_checkpoint(whole)
    others = ["0" * 12] * zoo.BLOCKS
    write_digest_file(tmp_path / "digests.json", encode_digest_file("model", checkpoint.revision, others))
    assert digests(checkpoint, file=tmp_path / "digests.json") == others


def test_a_file_that_is_none(tmp_path):
    for content in [
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
    ]:
        (tmp_path / "digests.json").write_text(content)
        with pytest.raises(DigestFileError, match="is not a usable file of digests"):
            read_digest_file(tmp_path / "digests.json")
        with pytest.raises(DigestFileError, match="No such file"):
            read_digest_file(tmp_path / "nothing.json")


def test_the_commit_of_a_hub_model_identifies_its_weights(weightless):
    on_hub = replace(open_checkpoint(weightless), source="somebody/model", revision="5c38")
    assert known_digests(on_hub) is None
    write_digest_file(
        weightless / FILE_BESIDE_CHECKPOINT, encode_digest_file("model", "other", ["0" * 12] * zoo.BLOCKS)
    )
    assert digests(on_hub) == ["0" * 12] * zoo.BLOCKS


def test_a_hub_that_cannot_be_reached_has_no_file(weightless):
    folder = open_checkpoint(weightless)

    def fetch(file):
        if file == FILE_BESIDE_CHECKPOINT:
            raise HubUnreachable(file)
        return folder.fetch(file)

    assert known_digests(replace(folder, source="somebody/model", fetch=fetch)) is None
