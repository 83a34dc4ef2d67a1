"""Modules that run in another process, and end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from swarm.common.processes import bound_command, module_command
from tests.waiting import wait_until


def test_nothing_is_imported_from_the_working_directory(tmp_path):
    """Which may be a stranger's checkpoint. `python -m` would import its files."""
    for name in ("resource", "signal", "llguidance", "swarm", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger runs code here')")
    done = subprocess.run(
        module_command("swarm.generation.formats.grammar_check"),
        input='start: "a"',
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_package_is_found_where_it_is_not_installed(tmp_path):
    """Such as in a checkout that is run as it is: `-I` hides what is installed, and where this process looks."""
    python, *rest = module_command("swarm.common.units")
    done = subprocess.run([python, "-I", "-S", *rest], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_are_the_modules(tmp_path):
    command = module_command("json.tool", "--compact", "--indent", "2")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, input="{}")
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
child.wait()
"""
"""Starts a command, says its process id when it is ready, and waits for it."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Modules are found in the temporary folder."""
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        return subprocess.CompletedProcess(command, process.wait(), output)


def test_the_module_runs_as_if_by_itself(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "talker.py").write_text("import sys; print(__name__, sys.argv); sys.exit(7)")
    result = run(bound_command("talker", "-m", "--option"), environment)
    assert result.stdout == f"__main__ {[str(tmp_path / 'talker.py'), '-m', '--option']}\n"
    assert result.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_parent_is_killed(tmp_path: Path, environment: dict[str, str], number: int) -> None:
    (tmp_path / "sleeper.py").write_text("import time; print('ready', flush=True); time.sleep(600)")
    command = [sys.executable, "-c", PARENT, *bound_command("sleeper")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline().split()[0]))
        assert not has_ended(child)
        parent.send_signal(number)
    wait_until(lambda: has_ended(child))


def test_it_may_leave_in_order(tmp_path: Path, environment: dict[str, str]) -> None:
    left = tmp_path / "left"
    (tmp_path / "leaver.py").write_text(
        "import pathlib, signal, sys\n"
        f"def leave(*_): pathlib.Path({str(left)!r}).touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('ready', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", PARENT, *bound_command("leaver")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline().split()[0]))
        parent.kill()
    wait_until(left.exists)
    wait_until(lambda: has_ended(child))
