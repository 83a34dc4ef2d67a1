"""The benchmark of weights between peers, on a small model."""

from __future__ import annotations

import pytest

from benchmarks.weights.__main__ import measure_memory, measure_rates, measure_resume, rates_row
from benchmarks.weights.links import loopback
from benchmarks.weights.random_model import make_random_model
from swarm.shared_weights.manifest import CHUNK_BYTES
from swarm.shared_weights.part_store import SPARE_BYTES


def test_rates_over_loopback(tmp_path):
    model = make_random_model(tmp_path / "model", 8e6)
    with loopback() as link:
        (found,) = measure_rates(link, 8 * CHUNK_BYTES, model, 1)
    assert 0 < found.fetch < found.tcp
    assert rates_row("loopback", 8e6, [found])[:2] == ["loopback", "8"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "what was received is removed"


@pytest.mark.slow
def test_memory_and_resuming(tmp_path):
    model = make_random_model(tmp_path / "model", 24e6)
    size = (model / "model.safetensors").stat().st_size
    found = measure_memory(model)
    assert set(found) == {"holder", "receiver"}
    assert all(0 <= one.process + one.daemon < SPARE_BYTES for one in found.values())
    (resumed,) = measure_resume(model, 1)
    assert size / 3 < resumed.after.kept < size
    assert 0 <= resumed.twice < size / 2
