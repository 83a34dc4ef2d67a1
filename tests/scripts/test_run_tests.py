"""Tests that fail are tried once more, alone. The tests that are run here are written by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.run_tests import MAX_FLAKY

ROOT = Path(__file__).parents[2]

PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False\n"
FAILS_FIRST = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_first(number):
    ran = pathlib.Path(f"ran-{{number}}")
    is_first = not ran.exists()
    ran.touch()
    assert not is_first
    assert "PYTEST_XDIST_WORKER" not in os.environ, "others run beside it"
"""
FAILS_AT_ITS_END = """
import pathlib, pytest

@pytest.fixture
def ends():
    yield
    ran = pathlib.Path("ran")
    is_first = not ran.exists()
    ran.touch()
    assert not is_first

def test_ends(ends): pass
"""


def run(folder: Path, tests: str) -> tuple[int, list[str]]:
    """Run a file of tests by two workers: the exit code, and the lines that are printed."""
    (folder / "test_it.py").write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.run_tests", "-q", "-p", "xdist.plugin", "-n", "2", "test_it.py"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


def test_what_fails_twice_has_failed(tmp_path):
    code, lines = run(tmp_path, PASSES + FAILS + FAILS_FIRST.format(count=1))
    assert code == 1
    assert lines[-2:] == ["failed twice: test_it.py::test_fails", "flaky: test_it.py::test_first[0]"]


def test_what_passes_alone_is_named_and_forgiven(tmp_path):
    code, lines = run(tmp_path, PASSES + FAILS_AT_ITS_END)
    assert code == 0
    assert lines[-1] == "flaky: test_it.py::test_ends"


def test_too_many_that_pass_alone_have_failed(tmp_path):
    code, lines = run(tmp_path, FAILS_FIRST.format(count=MAX_FLAKY + 1))
    assert code == 1
    assert sum(line.startswith("flaky: ") for line in lines) == MAX_FLAKY + 1
    assert lines[-1] == "6 tests are flaky; up to 5 are forgiven"


@pytest.mark.parametrize(("tests", "code"), [("", 5), ("def broken(", 1)])
def test_nothing_is_tried_again_where_no_test_failed(tmp_path, tests, code):
    found, lines = run(tmp_path, tests)
    assert found == code
    assert not any(line.startswith(("Trying", "flaky", "failed twice")) for line in lines)
