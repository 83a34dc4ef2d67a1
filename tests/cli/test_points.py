"""`swarm points`: what is shown of a key's points, and what is said of a key that is not there."""

from __future__ import annotations

from click.testing import CliRunner, Result

from swarm.cli.points import main
from swarm.transport.identity import load_or_create
from swarm.trust.points import Owner, encode_owners, points_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_a_key_is_made_only_if_asked_for(tmp_path):
    path = tmp_path / "identity"
    assert "there is no key" in run(path).output
    assert not path.exists()
    made = run(path, "--new")
    assert (made.exit_code, made.output.splitlines()[0]) == (0, f"Owner: {load_or_create(path).peer_id}")
    assert "No points yet" in made.output
    assert run(path, "--new").output == run(path).output == made.output


def test_points_are_listed_by_owner(tmp_path):
    path = tmp_path / "identity"
    load_or_create(path)
    owners = {"Much": Owner(served=900, signed=800), "More": Owner(given=1000, spent=100, served=100, signed=100)}
    points_path(path).write_bytes(encode_owners(owners))
    lines = [line.split() for line in run(path).output.splitlines()[2:]]
    assert lines == [["More", "100", "100", "1900"], ["Much", "900", "800", "0"], ["in", "all", "1000", "900", "1900"]]
    points_path(path).write_bytes(b"damaged")
    failed = run(path)
    assert failed.exit_code != 0
    assert "not a file of points" in failed.output
