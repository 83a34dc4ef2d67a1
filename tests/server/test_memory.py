from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.footprint import Footprint
from swarm.server import memory
from swarm.server.limits import HEADROOM
from swarm.server.memory import blocks_that_fit, check_fits, free_memory, resolve_device

CPU = torch.device("cpu")

footprints = st.builds(
    Footprint,
    weights=st.lists(st.integers(1, 10**9), min_size=1, max_size=12).map(tuple),
    cache_per_token=st.integers(0, 10**5),
)


@given(footprints, st.integers(0, 10**11), st.integers(1, 20_000))
@settings(deadline=None)
def test_what_fits_fits_wherever_the_window_lies(footprint, free, tokens):
    blocks = len(footprint.weights)
    try:
        count = blocks_that_fit(footprint, free, tokens)
    except NotEnoughMemory:
        heaviest = max(range(blocks), key=footprint.weights.__getitem__)
        with pytest.raises(NotEnoughMemory):
            check_fits(footprint, heaviest, heaviest + 1, free, tokens)
        return
    assert 1 <= count <= blocks
    for start in range(blocks - count + 1):
        check_fits(footprint, start, start + count, free, tokens)


@given(st.integers(1, 10**9), st.integers(1, 40), st.integers(0, 10**11))
@settings(deadline=None)
def test_one_block_more_would_not_fit(weight, blocks, free):
    footprint = Footprint((weight,) * blocks, 0)
    try:
        count = blocks_that_fit(footprint, free, 1)
    except NotEnoughMemory:
        count = 0
    assert count == blocks or (count + 1) * weight > int(free * HEADROOM)


def test_the_cache_takes_room_too():
    footprint = Footprint((100,) * 10, 1)
    assert blocks_that_fit(footprint, 2000, 1) == 10
    assert blocks_that_fit(footprint, 2000, 500) == 3
    check_fits(footprint, 0, 3, 2000, 500)
    with pytest.raises(NotEnoughMemory, match=r"blocks 0:4 take 2.4 KB .*500 tokens.*1.8 KB are free"):
        check_fits(footprint, 0, 4, 2000, 500)


def test_not_even_one_block():
    with pytest.raises(NotEnoughMemory, match="--cache-tokens"):
        blocks_that_fit(Footprint((100,), 0), 100, 1)


def test_free_memory_of_this_machine():
    assert 0 < free_memory(CPU) < 1 << 50


def container(monkeypatch, tmp_path: Path, limit: str | None, used: str = "0") -> None:
    monkeypatch.setattr(memory, "Path", lambda _: tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max\n", "10\n", 1000), ("700\n", "100\n", 600), ("5000\n", "100\n", 1000), (None, "", 1000)],
    ids=["no limit", "limit", "limit above the machine's", "no cgroup"],
)
def test_a_container_has_less(monkeypatch, tmp_path, limit, used, free):
    container(monkeypatch, tmp_path, limit, used)
    assert free_memory(CPU) == free


def test_the_device():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cpu:cpu", "cuda:99", "xpu:7"])
def test_a_device_that_this_machine_has_not(name):
    with pytest.raises(InvalidOption, match="--device"):
        resolve_device(name)
