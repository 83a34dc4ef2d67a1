"""The console script: its options are frozen here, so that none changes by accident."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from swarm.cli.__main__ import COMMANDS, LazyGroup, main
from swarm.common.console import repeat_option_names
from swarm.common.version import VERSION

OPTIONS = {
    "server": {
        "model", "--revision", "--blocks", "--initial-peers", "--membership", "--new-swarm", "--host-maddrs",
        "--announce-maddrs", "--relay", "--identity-path", "--device", "--dtype", "--quant", "--flash",
        "--flash-exact", "--exits", "--exits-from", "--throughput", "--name", "--cache-tokens", "--cache-dir",
        "--update-period", "--adapters", "--vouchers",
        "--threads", "--stay", "--metrics", "--weights-from", "--digests",
        "--share-weights", "--share-rate",
        "--log-format", "--help",
    },
    "dht": {
        "--initial-peers", "--membership", "--host-maddrs", "--announce-maddrs", "--identity-path", "--address-file",
        "--relay", "--metrics", "--log-format", "--help",
    },
    "chat": {
        "model", "--initial-peers", "--membership", "--system", "--temperature",
        "--max-tokens", "--early-exit", "--draft", "--digests", "--audit", "--opinions", "--weights-from", "--help",
    },
    "doctor": {
        "model", "--initial-peers", "--membership", "--device", "--host-maddrs", "--json", "--help",
    },
    "plan": {
        "file", "--model", "--revision", "--initial-peers", "--membership", "--write", "--json", "--help",
    },
    "gateway": {
        "models", "--initial-peers", "--membership", "--host", "--port", "--keys", "--open", "--host-name",
        "--concurrent", "--cors", "--public-status",
        "--wire", "--exact", "--audit", "--opinions", "--points", "--digests", "--weights-from", "--early-exit",
        "--draft", "--prefix-memory", "--exits-from", "--approximate-exits",
        "--log-format", "--help",
    },
    "worker": {
        "--host-maddrs", "--announce-maddrs", "--membership", "--name", "--device", "--folder",
        "--cache-dir", "--forget", "--log-format", "--help",
    },
    "ring": {
        "model", "--workers", "--partition", "--chat", "--gateway", "--keys", "--open", "--save", "--unpair",
        "--revision", "--dtype", "--quant", "--cache-tokens", "--threads", "--folder", "--host-maddrs",
        "--announce-maddrs", "--membership", "--help",
    },
    "demo": {"--help", "--serve", "--port"},
    "status": {"models", "--initial-peers", "--membership", "--opinions", "--json", "--watch", "--help"},
    "monitor": {
        "models", "--initial-peers", "--membership", "--opinions", "--host", "--port", "--log-format",
        "--help",
    },
    "members": {"--help"},
    "keys": {"--help"},
    "digest": {"model", "--revision", "--for-peers", "--help"},
    "receipt": {"--help"},
    "points": {"identity", "--new", "--help"},
}  # fmt: skip


def test_every_command_has_its_options_frozen() -> None:
    assert set(COMMANDS) == set(OPTIONS)


def test_options() -> None:
    for name in OPTIONS:
        group = main
        assert isinstance(group, LazyGroup)
        context = group.make_context("swarm", [name])
        command = group.get_command(context, name)
        assert command is not None
        assert {parameter.opts[-1] for parameter in command.get_params(context)} == OPTIONS[name]


def test_help() -> None:
    for arguments in [["--help"], ["--version"], *([name, "--help"] for name in OPTIONS)]:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert VERSION in result.output or "Usage:" in result.output


def test_unknown_words_are_refused() -> None:
    for arguments in [["nonsense"], ["server", "--nonsense"], ["demo", "--tokens", "9"]]:
        assert CliRunner().invoke(main, arguments).exit_code == 2


def test_help_does_not_load_torch() -> None:
    code = "import sys, swarm, swarm.cli.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_addresses_behind_one_option() -> None:
    options = frozenset({"--initial-peers"})
    given = ["model", "--initial-peers", "/a", "/b", "--name", "x", "--initial-peers=/c"]
    expected = ["model", "--initial-peers", "/a", "--initial-peers", "/b", "--name", "x", "--initial-peers=/c"]
    assert repeat_option_names(given, options) == expected
    lines = ["--workers", "swarm-worker:a", "swarm-worker:b", "model"]
    assert repeat_option_names(lines, frozenset({"--workers"}), ("swarm-worker:",)) == [
        *("--workers", "swarm-worker:a", "--workers", "swarm-worker:b", "model")
    ]
    assert repeat_option_names(["--initial-peers", "/a", "model"], options) == ["--initial-peers", "/a", "model"]
