"""The examples that train something, as a person runs them, for a few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.swarms import TestSwarm, run_swarm

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT_S = 1500
"""For an example that hangs: the longest takes two minutes on two cores that have nothing else to do, and up to ten
times as long beside other work."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 100)]


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, ("0:4", "4:8", "8:12")) as swarm:
        yield swarm


def run(swarm: TestSwarm, name: str, folder: Path, *options: str) -> str:
    where = ("--model", str(DEMO_FOLDER), "--initial-peers", swarm.address)
    command = [sys.executable, str(EXAMPLES / name), *where, "--output", str(folder)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def figures(output: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith("Held-out"))
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_prompts_are_tuned_for_classification(swarm: TestSwarm, tmp_path: Path) -> None:
    before, after, _ = figures(run(swarm, "prompt_tuning.py", tmp_path, "--steps", "2", "--held-out", "64"))
    assert 0 < before < 1
    assert 0 < after < 1
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "adapter_config.json").exists()


def test_lora_learns_text_from_the_first_steps_on(swarm: TestSwarm, tmp_path: Path) -> None:
    before, after, _ = figures(run(swarm, "lora_text.py", tmp_path, "--steps", "4", "--held-out", "16"))
    assert after < before
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_a_text_with_early_exits_is_the_same(swarm: TestSwarm, tmp_path: Path) -> None:
    output = run(swarm, "early_exit.py", tmp_path, "--train-tokens", "1024", "--tokens", "24", "--threshold", "0")
    assert output.splitlines()[-1] == "The texts are equal"
    assert re.search(r"^In front of block 4, \d+% say .*\nIn front of block 8, ", output, re.MULTILINE)
    assert re.search(r"^With exits: [\d.]+ tokens/s; \d+ tokens left, \d+ of \d+ stood$", output, re.MULTILINE)
    assert (tmp_path / "exits.safetensors").exists()


def test_a_module_between_the_blocks_is_trained(swarm: TestSwarm, tmp_path: Path) -> None:
    at_random, by_likeness, _ = figures(run(swarm, "retrieval.py", tmp_path, "--steps", "10", "--held-out", "16"))
    assert by_likeness < at_random
    assert (tmp_path / "loss.png").stat().st_size > 1000
