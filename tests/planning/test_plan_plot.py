from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm.errors import UsageError
from swarm.planning.partition import partition
from swarm.planning.plan_report import plot_plan
from tests.planning.groups import group_of

PLAN = partition(group_of([3.0, 1.0], 8, send=0.1))


def test_a_png_is_written(tmp_path: Path) -> None:
    plot_plan(PLAN, tmp_path / "plan")
    assert (tmp_path / "plan").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'swarm\[plot\]'"):
        plot_plan(PLAN, tmp_path / "plan.png")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        plot_plan(PLAN, tmp_path / "absent" / "plan.png")
