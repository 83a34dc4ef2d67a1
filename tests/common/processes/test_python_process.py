"""Modules of this project in other processes."""

from __future__ import annotations

import subprocess

from swarm.common.processes.python_process import module_command


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
    python, *rest = module_command("swarm.common.processes.python_process")
    done = subprocess.run([python, "-I", "-S", *rest], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_are_the_modules(tmp_path):
    command = module_command("json.tool", "--compact", "--indent", "2")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, input="{}")
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr
