from __future__ import annotations

import stat

import pytest
from click.testing import CliRunner

from swarm.cli.__main__ import main
from swarm.gateway.api_keys import KeyFile, KeyLimits

OPTIONS = {
    "add": {"name", "--file", "--requests-per-minute", "--tokens-per-minute", "--concurrent", "--help"},
    "list": {"--file", "--help"},
    "remove": {"name", "--file", "--help"},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def run(*arguments):
    return CliRunner().invoke(main, ["keys", *map(str, arguments)])


def test_options_are_frozen():
    for name in OPTIONS:
        from swarm.cli import keys

        command = keys.main.commands[name]
        context = command.make_context(name, ["ann", "--file", "x"] if "name" in OPTIONS[name] else ["--file", "x"])
        assert {parameter.opts[-1] for parameter in command.get_params(context)} == OPTIONS[name]


def test_the_secret_is_printed_once_and_alone_and_only_its_hash_is_kept(path):
    result = run("add", "ann", "--file", path, "--requests-per-minute", 60, "--concurrent", 2)
    assert result.exit_code == 0
    secret = result.stdout.strip()
    assert secret.startswith("sk-swarm-")
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyFile.read(path).find(secret).limits == KeyLimits(60, None, 2)


def test_list_names_keys_and_limits(path):
    run("add", "berta", "--file", path, "--tokens-per-minute", 5000)
    run("add", "ann", "--file", path)
    result = run("list", "--file", path)
    assert result.stdout == "ann    no limits\nberta  5000 tokens/min\n"


def test_removed_keys_are_gone(path):
    secret = run("add", "ann", "--file", path).stdout.strip()
    assert run("remove", "ann", "--file", path).exit_code == 0
    assert KeyFile.read(path).find(secret) is None
    assert "has no keys: create one with" in run("list", "--file", path).stderr


def test_what_cannot_be_done_exits_with_2_and_one_line(path):
    for arguments, says in [
        (("remove", "berta"), "has no key berta"),
        (("add", "ann"), "already has a key ann"),
        (("add", "no spaces"), "'no spaces' is not a valid key name"),
        (("add", "berta", "--concurrent", 0), "0 is not in the range"),
    ]:
        run("add", "ann", "--file", path)
        result = run(*arguments, "--file", path)
        assert result.exit_code == 2
        assert says in result.stderr


def test_a_missing_file_is_an_error_for_list_and_remove(path):
    assert run("list", "--file", path).exit_code == run("remove", "ann", "--file", path).exit_code == 2
