"""Folders that need not exist yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.common.files.folders import cache_folder, data_folder, nearest_folder


@pytest.mark.parametrize(
    ("find", "variable", "usual"),
    [(cache_folder, "XDG_CACHE_HOME", ".cache"), (data_folder, "XDG_DATA_HOME", ".local/share")],
)
def test_the_folder_is_where_the_standard_says(monkeypatch, tmp_path, find, variable, usual):
    monkeypatch.setenv(variable, str(tmp_path))
    assert find() == tmp_path / "swarm"
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv(variable, ignored)
        assert find() == Path("/home/someone", usual, "swarm")


def test_the_nearest_folder_exists(tmp_path):
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path
