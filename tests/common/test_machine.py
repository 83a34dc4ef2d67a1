from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm.common import machine as module
from swarm.common.machine import available_memory

STAT = "anon 100\nfile 350\nkernel 20\nshmem 50\n"


def container(tmp_path: Path, limit: str, used: str, stat: str | None) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    if stat is not None:
        (tmp_path / "memory.stat").write_text(stat)


@pytest.fixture
def cgroup(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    return tmp_path


def test_of_this_machine():
    assert 0 < available_memory() < 1 << 50


def test_without_a_container(cgroup):
    assert available_memory() == 1000


@pytest.mark.parametrize(
    ("limit", "used", "stat", "available"),
    [
        ("max\n", "10\n", STAT, 1000),
        ("700\n", "500\n", STAT, 700 - 500 + 350 - 50),
        ("700\n", "500\n", "file 0\nshmem 0\n", 200),
        ("5000\n", "100\n", STAT, 1000),
        ("700\n", "800\n", "file 30\nshmem 0\n", 0),
        ("700\n", "500\n", None, 200),
        ("700\n", "500\n", "file many\nshmem 0\n", 200),
        ("700\n", "500\n", "anon 100\n", 200),
    ],
    ids=[
        *("no limit", "page cache", "no page cache", "limit above the machine's"),
        *("more than the limit", "no counts", "bad counts", "other counts"),
    ],
)
def test_in_a_container(cgroup, limit, used, stat, available):
    container(cgroup, limit, used, stat)
    assert available_memory() == available
