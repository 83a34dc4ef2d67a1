"""The command that writes down which weights servers must have."""

from __future__ import annotations

import json

from click.testing import CliRunner

from swarm.cli.__main__ import main
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import known_digests
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.manifest import all_parts
from swarm.shared_weights.trust import TrustedParts, trusted_by_file
from tests.zoo import make_checkpoint


def run(*arguments):
    return CliRunner().invoke(main, ["digest", *map(str, arguments)])


def test_the_demo_model(tmp_path):
    path = tmp_path / "digests.json"
    result = run()
    assert result.exit_code == 0, result.output
    path.write_text(result.output)
    checkpoint = open_checkpoint()
    assert known_digests(checkpoint, path).by_block == known_digests(checkpoint).by_block


def test_what_cannot_be_digested(tmp_path):
    result = run(tmp_path / "nothing")
    assert result.exit_code == 2
    assert "neither a local folder nor a model's name" in result.output


def test_digests_for_peers_are_those_of_all_parts(tmp_path):
    path = tmp_path / "digests.json"
    assert "parts" not in json.loads(run().output), "they take time, because every byte is read"
    result = run("--for-peers")
    assert result.exit_code == 0, result.output
    path.write_bytes(result.stdout_bytes)
    checkpoint = open_checkpoint()
    manifests = CheckpointParts(checkpoint).manifests()
    assert set(manifests.digests) == set(all_parts(checkpoint.blocks))
    expected = TrustedParts(checkpoint.revision, checkpoint.blocks, manifests.digests)
    assert trusted_by_file(checkpoint.name, path) == expected
    assert known_digests(checkpoint, path).by_block == known_digests(checkpoint).by_block


def test_there_are_no_digests_for_peers_of_weights_that_are_not_here(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model", max_shard_size="40KB")
    (folder / "swarm-digests.json").write_text(run(folder).output)
    next(folder.glob("*-00002-of-*.safetensors")).unlink()
    assert run(folder).exit_code == 0, "what its author wrote down is there"
    result = run(folder, "--for-peers")
    assert result.exit_code == 2
    assert "of model is not on this machine" in result.output
    assert "leave --for-peers out" in result.output
