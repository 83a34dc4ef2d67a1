from __future__ import annotations

import stat

import pytest
from click.testing import CliRunner

from swarm.cli.__main__ import main
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.membership.authority import read_authority
from swarm.membership.invite import INVITE_PREFIX, parse_invite

OPTIONS = {
    "init": {"--file", "--help"},
    "invite": {"name", "--file", "--days", "--help"},
    "revoke": {"name", "--file", "--initial-peers", "--help"},
    "publish": {"--file", "--initial-peers", "--help"},
    "list": {"--file", "--help"},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "authority" / "members.json"


def run(*arguments, **environment):
    environment = {"SWARM_INITIAL_PEERS": None, "SWARM_MEMBERS_FILE": None, **environment}
    return CliRunner(env=environment).invoke(main, ["members", *map(str, arguments)])


def test_options_are_frozen():
    for name in OPTIONS:
        from swarm.cli import members

        command = members.main.commands[name]
        context = command.make_context(name, ["anna"] if "name" in OPTIONS[name] else [])
        assert {parameter.opts[-1] for parameter in command.get_params(context)} == OPTIONS[name]


def test_the_authoritys_key_is_never_printed(path):
    outputs = [run("init", "--file", path).output, run("invite", "anna", "--file", path).output]
    outputs += [run(*command, "--file", path).output for command in (("list",), ("revoke", "anna"), ("init",))]
    authority = read_authority(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert authority.fingerprint in outputs[0]
    for output in outputs:
        assert authority.private_key.hex() not in output
        assert str(authority.private_key) not in output


def test_an_invite_is_one_line_on_its_own(path):
    run("init", "--file", path)
    result = run("invite", "anna", "--file", path, "--days", 7)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.startswith(INVITE_PREFIX)
    assert parse_invite(line).certificate.name == "anna"
    assert "anna, until 20" in result.stderr


def test_list_shows_who_is_what(path):
    run("init", "--file", path)
    assert "has no invites: make one with" in run("list", "--file", path).stderr
    for name in ("berta", "anna"):
        run("invite", name, "--file", path)
    run("invite", "carl", "--file", path, "--days", 1e-9)
    result = run("revoke", "berta", "--file", path)
    assert result.exit_code == 0
    assert "Revoked 1 invite of berta" in result.stderr
    assert "No peer knows it yet: swarm members publish --initial-peers" in result.stderr
    lines = [line.split() for line in run("list", "--file", path).stdout.splitlines()]
    assert [line[:2] for line in lines] == [["anna", "valid"], ["berta", "revoked"], ["carl", "expired"]]


def test_the_file_may_come_from_the_environment(path):
    assert run("init", SWARM_MEMBERS_FILE=str(path)).exit_code == 0
    assert read_authority(path).invitations == []


def test_what_cannot_be_done_is_one_line_and_exit_code_2(path):
    for arguments, message in [
        (("invite", "anna"), "make an authority with `swarm members init`"),
        (("revoke", "anna"), "does not exist"),
        (("list",), "does not exist"),
        (("publish", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm"), "does not exist"),
        (("invite", "anna", "--days", "0"), "more than 0 and at most"),
        (("invite", "anna", "--days", "nan"), "more than 0 and at most"),
    ]:
        result = run(*arguments, "--file", path)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.output


def test_nothing_to_publish_and_nobody_to_tell(path):
    run("init", "--file", path)
    assert "nothing to publish" in run("publish", "--file", path).stderr
    run("invite", "anna", "--file", path)
    run("revoke", "anna", "--file", path)
    assert "give --initial-peers" in run("publish", "--file", path).stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")
def test_a_swarm_is_locked_with_these_commands(path, tmp_path):
    run("init", "--file", path)
    invites = {name: run("invite", name, "--file", path).stdout.strip() for name in ("owner", "anna", "berta")}
    owner = tmp_path / "owner.invite"
    owner.write_text(invites["owner"] + "\n")
    peer = PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK, "--membership", str(owner)))

    def status(invite: str) -> str:
        """What `swarm status` says: it finds an empty swarm, or is told why not."""
        environment = {"SWARM_INITIAL_PEERS": peer.address(), "SWARM_MEMBERSHIP": invite}
        result = CliRunner(env=environment).invoke(main, ["status"])
        assert invite == "" or invite not in result.output
        return result.output if result.exit_code == 2 else f"found, {result.exit_code}"

    try:
        assert status(invites["anna"]) == status(invites["berta"]) == "found, 1"
        assert "this swarm is private: ask" in status("")
        older = path.read_bytes()
        result = run("revoke", "anna", "--file", path, "--initial-peers", peer.address())
        assert result.exit_code == 0, result.output
        assert "Told 1 peer, which tells the others" in result.stderr
        assert "membership of anna was revoked" in status(invites["anna"])
        assert status(invites["berta"]) == "found, 1"
        assert run("publish", "--file", path, "--initial-peers", peer.address()).exit_code == 0
        path.write_bytes(older)
        result = run("revoke", "berta", "--file", path, "--initial-peers", peer.address())
        assert (result.exit_code, "an older copy" in result.stderr) == (2, True), result.output
        assert not [line for line in peer.lines if "swarm-invite" in line]
    finally:
        peer.stop()
