"""Which Python `make` takes, and what `make gpu` runs, with interpreters that only say that they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WORKS = '#!/bin/sh\necho "$(basename $0) $*"\n'
NO_VENV = '#!/bin/sh\ncase "$*" in *ensurepip*|*find_spec*) exit 1;; esac\necho "$(basename $0) $*"\n'


@pytest.fixture
def run(tmp_path):
    """Runs make in a copy of the Makefile, with nothing on the path but these interpreters and make's own tools."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    for tool in ("make", "sh", "basename", "test", "echo", "touch"):
        (programs / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")

    def make(pythons: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for name, script in pythons.items():
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        environment = {"PATH": str(programs), "HOME": str(tmp_path)}
        command = ["make", "--no-print-directory", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return make


@pytest.mark.parametrize(
    ("pythons", "arguments", "taken"),
    [
        ({"python3.11": WORKS, "python3.12": WORKS, "python3.13": WORKS}, [], "python3.13"),
        ({"python3.11": WORKS, "python3.12": WORKS, "python3.13": NO_VENV}, [], "python3.12"),
        ({"python3.11": WORKS, "python3.10": WORKS, "python3": WORKS}, [], "python3.11"),
        ({"python3.11": WORKS, "python3.13": WORKS, "mine": NO_VENV}, ["PYTHON=mine"], "mine"),
    ],
)
def test_the_newest_python_that_can_make_environments_is_taken(run, pythons, arguments, taken):
    done = run(pythons, "-n", ".venv/runtime", *arguments)
    assert f"|| {taken} -m venv .venv" in done.stdout, done.stderr


@pytest.mark.parametrize("pythons", [{}, {"python3.12": NO_VENV, "python3": WORKS}])
def test_without_one_it_says_what_to_install(run, pythons):
    done = run(pythons, ".venv/runtime")
    assert done.returncode != 0
    assert "install one of python3.13 python3.12 python3.11 with its venv and ensurepip" in done.stderr
    assert "-m venv" not in done.stdout


def test_the_gpu_command_installs_nothing_where_torch_is(run):
    done = run({"python3": WORKS}, "gpu", "GPU_ARGS=--quick")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "python3 -m benchmarks.gpu --quick"
    assert "pip" not in done.stdout


def in_environment(tmp_path: Path, script: str) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(script)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)


@pytest.mark.parametrize(
    ("environment", "pythons", "arguments", "taken"),
    [
        (WORKS, {"python3": WORKS}, [], "python"),
        (NO_VENV, {"python3": WORKS}, [], "python3"),  # pip failed in it
        (NO_VENV, {"python3.12": WORKS, "python3": WORKS}, [], "python3.12"),
        (WORKS, {"python3": WORKS, "mine": WORKS}, ["PYTHON=mine"], "mine"),
        (WORKS, {"python3": WORKS, "mine": NO_VENV}, ["PYTHON=mine"], "python"),
    ],
)
def test_the_gpu_command_takes_a_python_that_has_torch(run, tmp_path, environment, pythons, arguments, taken):
    in_environment(tmp_path, environment)
    done = run(pythons, "gpu", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == f"{taken} -m benchmarks.gpu"


def test_the_gpu_command_makes_an_environment_where_torch_is_not(run, tmp_path):
    """The interpreter here makes an environment whose Python says that it was called."""
    script = NO_VENV.replace('echo "', f'mkdir -p .venv/bin; cp {tmp_path}/programs/works .venv/bin/python\necho "')
    (tmp_path / "programs" / "works").write_text(WORKS)
    (tmp_path / "programs" / "works").chmod(0o755)
    for tool in ("mkdir", "cp"):
        os.symlink(shutil.which(tool) or f"/bin/{tool}", tmp_path / "programs" / tool)
    done = run({"python3": NO_VENV, "mine": script}, "gpu", "PYTHON=mine")
    assert done.returncode == 0, done.stderr
    assert "mine -m venv .venv" in done.stdout
    assert "python -m pip install" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "python -m benchmarks.gpu"
