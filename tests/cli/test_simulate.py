"""`swarm simulate` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarm.cli.__main__ import main
from swarm.planning.simulation.scenario import shipped_scenarios

SMALL = """
description: A small swarm.
blocks: 12
duration: 900
machines: {blocks: [2, 6]}
events:
  - {type: join, servers: 30, over: 60}
  - {type: leave, at: 700, blocks: [0, 4]}
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_file_is_simulated_drawn_and_written(file: Path, tmp_path: Path) -> None:
    plot, data = tmp_path / "plot.png", tmp_path / "data.json"
    result = run(file, "--plot", plot, "--json", data, "--seed", 5)
    assert result.exit_code == 0, result.output
    assert "A small swarm." in result.output
    assert "seed 5" in result.output
    assert "of the optimum" in result.output
    assert "Outages: 1" in result.output
    assert "  blocks 0:" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(data.read_bytes())["outcome"]["seed"] == 5


def test_the_shipped_ones_are_listed() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(shipped_scenarios())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--list"),
        (["nonsense"], "one of churn, growth"),
        (["missing.yaml"], "cannot be read"),
        (["{wrong}"], "events[0].servers"),
        (["{file}", "--json", "{folder}/missing/data.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], said: str, file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SMALL.replace("servers: 30", "servers: many"))
    result = run(*(one.format(wrong=wrong, file=file, folder=tmp_path) for one in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_neither_torch_nor_matplotlib_is_loaded_without_need(file: Path) -> None:
    code = (
        "import sys; from swarm.cli.simulate import main; main([sys.argv[1]], standalone_mode=False); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'hivemind', 'transformers', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
