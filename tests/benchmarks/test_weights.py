"""The benchmark of weights between peers, on a small model."""

from __future__ import annotations

import pytest

from benchmarks.weights.__main__ import inference_rows, measure_memory, measure_rates, measure_resume, rates_row
from benchmarks.weights.inference import FROM_ANOTHER, FROM_SERVER, NOTHING, Uploads
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


def test_the_slowdown_is_that_of_each_round():
    milliseconds = {NOTHING: [10.0, 20.0, 10.0], FROM_SERVER: [11.0, 22.0, 10.0], FROM_ANOTHER: [10.0, 20.0, 10.0]}
    rates = {NOTHING: [], FROM_SERVER: [8.0] * 3, FROM_ANOTHER: [8.0] * 3}
    rows = inference_rows(Uploads(milliseconds, rates))
    assert [row[-1] for row in rows] == ["", "10 (0 to 10)", "0 (0 to 0)"]


def test_the_size_of_a_random_model(tmp_path):
    for size in (8e6, 24e6, 180e6):
        model = make_random_model(tmp_path / f"{size:.0f}", size)
        assert (0.7 if size > 1e8 else 0.2) * size < (model / "model.safetensors").stat().st_size < 1.3 * size
    with pytest.raises(SystemExit, match="GB free"):
        make_random_model(tmp_path / "large", 1e18)
