"""`swarm plan` as a person meets it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarm.cli.__main__ import main
from swarm.planning.group_description import parse_group_file
from tests.swarms import run_swarm
from tests.zoo import make_checkpoint

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
DEVICES = """
devices:
  - {name: desktop, memory: 8 GB, speed: 100}
  - {name: laptop, memory: 4 GB, speed: 50}
"""
NUMBERS = "model: {name: org/model, blocks: 6, block_memory: 1 GB, cache_memory: 1 KB, hidden_size: 64}"


def plan(*arguments: object, **environment: str) -> Result:
    return CliRunner(env={"SWARM_INITIAL_PEERS": None, **environment}).invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "group.yaml"
    path.write_text(NUMBERS + DEVICES)
    return path


def test_a_model_in_numbers(file: Path) -> None:
    result = plan(file)
    assert result.exit_code == 0, result.output
    assert re.search(r"^desktop +(0:4|2:6) +4.07 GB of 7.2 GB", result.output, re.MULTILINE)
    assert re.search(r"^laptop +(4:6|0:2) +2.03 GB of 3.6 GB", result.output, re.MULTILINE)
    assert "Links: 5 ms one way and 12.5 MB/s unless described otherwise" in result.output
    assert "Bottleneck: desktop, 40." in result.output
    commands = [line for line in result.output.splitlines() if line.startswith("swarm server ")]
    assert len(commands) == 2
    assert all("org/model" in command and "--cache-tokens 16384" in command for command in commands)
    assert commands[0].endswith("--new-swarm")
    assert commands[1].endswith("--initial-peers ADDRESS")


def test_the_printed_commands_are_commands(file: Path) -> None:
    from swarm.server.__main__ import main as server

    file.write_text(f"dtype: float32\n{file.read_text()}")
    result = plan(file, "--initial-peers", NOBODY, "--revision", "v1")
    for line in result.output.splitlines():
        if line.startswith("swarm server "):
            parameters = server.make_context("server", shlex.split(line)[2:]).params
            assert parameters["initial_peers"] == (NOBODY,)
            assert parameters["cache_tokens"] == 16384
            assert (parameters["model"], parameters["dtype"], parameters["revision"]) == ("org/model", "float32", "v1")
            assert parameters["name"] in ("desktop", "laptop")
            assert re.fullmatch(r"\d:\d", parameters["blocks"])


def test_the_demo_model_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text(f"cache_tokens: 512{DEVICES}")
    result = plan(tmp_path / "group.yaml")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("swarm-demo: 12 blocks take 20.3 MB with an attention cache of 512 tokens")


def test_a_local_model(file: Path, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "a model")
    result = plan(file, "--model", folder)
    assert result.exit_code == 0, result.output
    assert f"swarm server '{folder}' --blocks" in result.output


def test_all_that_can_be_written(file: Path, tmp_path: Path) -> None:
    written, answer = tmp_path / "again.yaml", tmp_path / "plan.json"
    result = plan(file, "--write", written, "--json", answer)
    assert result.exit_code == 0, result.output
    assert parse_group_file(written.read_bytes()) == parse_group_file(file.read_bytes())
    assert plan(written).output == result.output
    assert {stage["device"] for stage in json.loads(answer.read_bytes())["stages"]} == {"desktop", "laptop"}


def test_what_was_written_before_is_kept(file: Path) -> None:
    before = file.read_bytes()
    result = plan(file, "--write", file)
    assert result.exit_code == 2
    assert "the file exists" in result.output
    assert file.read_bytes() == before


@pytest.mark.parametrize("option", ["--write", "--json"])
def test_where_nothing_can_be_written(file: Path, tmp_path: Path, option: str) -> None:
    result = plan(file, option, tmp_path / "absent" / "file")
    assert result.exit_code == 2
    assert result.output.endswith("cannot be written: No such file or directory\n")


def test_a_warning(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text(f"{NUMBERS}{DEVICES}  - {{name: phone, memory: 4 GB, speed: 0.5}}\n")
    result = plan(tmp_path / "group.yaml")
    assert result.exit_code == 0
    assert re.search(r"^phone +none", result.output, re.MULTILINE)
    assert "WARNING: leave out phone: 0.5 tokens/s (" in result.output


def test_the_model_does_not_fit(file: Path) -> None:
    file.write_text(file.read_text().replace("blocks: 6", "blocks: 12"))
    result = plan(file)
    assert result.exit_code == 2
    assert result.output.startswith("Error: the 12 blocks take 12.2 GB with an attention cache of 16384 tokens")
    assert "blocks 10:12 (2.03 GB) find no place" in result.output
    assert result.output.count("\n") == 1


def test_a_wrong_field(file: Path) -> None:
    file.write_text(file.read_text().replace("8 GB", "a lot"))
    result = plan(file)
    assert result.exit_code == 2
    expected = f"Error: {file}: devices[0].memory: 'a lot' is not a size such as 8GB or 512 MiB\n"
    assert result.output == expected


def test_nothing_to_plan_for() -> None:
    result = plan()
    assert result.exit_code == 2
    assert result.output.startswith("Error: nothing to plan for: give a FILE")


def test_nobody_answers() -> None:
    result = plan("--initial-peers", NOBODY)
    assert result.exit_code == 2
    assert result.output.startswith("Error: none of the initial peers answered")


def test_numbers_do_not_load_torch(file: Path) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from swarm.cli.plan import main\n"
        "result = CliRunner().invoke(main, [sys.argv[1]]); assert result.exit_code == 0, result.output\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'hivemind', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == 0


def test_a_running_swarm(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    written = tmp_path / "group.yaml"
    with run_swarm(folder, ("0:4", "2:6"), dtype="float32", cache_tokens=1000) as swarm:
        result = plan("--model", folder, "--initial-peers", swarm.address, "--write", written)
        assert result.exit_code == 0, result.output
        assert "6 blocks take " in result.output
        assert "with an attention cache of 1000 tokens" in result.output
        commands = [line for line in result.output.splitlines() if line.startswith("swarm server ")]
        # Both announce the same speed.
        assert [re.search(r"--blocks (\S+)", command)[1] for command in commands] == ["0:3", "3:6"]  # type: ignore[index]
        assert all(f"--initial-peers {swarm.address}" in command for command in commands)

        description = parse_group_file(written.read_bytes())
        assert [device.speed for device in description.devices] == [1000.0, 1000.0]
        assert {device.name[-6:] for device in description.devices} == {s.peer_id[-6:] for s in swarm.servers}
        assert plan(written, "--initial-peers", swarm.address).output == result.output

    # What a person knows better counts: one of the two has room for two blocks only.
    first = description.devices[0]
    written.write_text(written.read_text().replace(f"memory: {first.memory}", f"memory: {first.memory // 2}", 1))
    edited = plan(written)
    assert re.search(rf"^{first.name} +(0:2|4:6) ", edited.output, re.MULTILINE), edited.output
