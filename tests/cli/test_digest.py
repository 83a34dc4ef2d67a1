"""The command that writes down which weights servers must have."""

from __future__ import annotations

import json

from click.testing import CliRunner

from swarm.cli.__main__ import main
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import known_digests


def run(*arguments):
    return CliRunner().invoke(main, ["digest", *map(str, arguments)])


def test_the_demo_model(tmp_path):
    path = tmp_path / "digests.json"
    result = run("--output", path)
    assert result.exit_code == 0, result.output
    assert "Wrote the digests of 12 blocks of swarm-demo" in result.output
    checkpoint = open_checkpoint()
    assert known_digests(checkpoint, path).by_block == known_digests(checkpoint).by_block
    assert json.loads(run().output) == json.loads(path.read_text())


def test_what_cannot_be_digested(tmp_path):
    result = run(tmp_path / "nothing")
    assert result.exit_code == 2
    assert "neither a local folder nor a model's name" in result.output
    (tmp_path / "file").write_text("")
    result = run("--output", tmp_path / "file" / "digests.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.output
