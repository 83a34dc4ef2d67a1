from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import time_box
from tests.time_box import rotated

ROOT = Path(__file__).parents[1]


@given(st.lists(st.text(), unique=True), st.text())
def test_every_module_keeps_its_neighbors(modules, first):
    found = rotated(modules, first)
    begin = found.index(modules[0]) if modules else 0
    assert found[begin:] + found[:begin] == modules


def test_commits_begin_with_different_modules():
    modules = [str(number) for number in range(50)]
    assert len({rotated(modules, f"commit {number}")[0] for number in range(50)}) > 20
    assert rotated(modules, "") == modules


@pytest.mark.parametrize(("seconds", "outcome"), [(3600, "3 passed"), (-1, "3 skipped")])
def test_what_has_not_begun_in_time_is_skipped_and_named(seconds, outcome):
    environment = {**os.environ, time_box.UNTIL: str(time.time() + seconds), time_box.FIRST: "abc"}
    # A module of a few quick tests.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/common/test_warn_once.py"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
    assert outcome.split()[1] in found.stdout
    assert ("not begun: the time was up" in found.stdout) == (seconds < 0)
