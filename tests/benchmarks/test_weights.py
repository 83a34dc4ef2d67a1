"""The benchmark of weights between peers, on a small model."""

from __future__ import annotations

import pytest

from benchmarks.common.report import Report, report_parser
from benchmarks.weights.__main__ import measure_memory, measure_rates, measure_resume
from benchmarks.weights.links import loopback
from benchmarks.weights.random_model import make_random_model
from swarm.shared_weights.manifest import CHUNK_BYTES
from swarm.shared_weights.part_store import SPARE_BYTES


def test_rates_over_loopback(tmp_path):
    model = make_random_model(tmp_path / "model", 8e6)
    report = Report(report_parser("", repeats=1).parse_args(["--patience", "0"]))
    with loopback() as link:
        measure_rates(report, link, 8 * CHUNK_BYTES, model)
    found = {figure.name: figure.values for figure in report.figures}
    assert 0 < found["weights, MB/s"][0] < found["bare TCP, MB/s"][0]
    assert all(figure.where.startswith("loopback, model of ") for figure in report.figures)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "what was received is removed"


@pytest.mark.slow
def test_memory_and_resuming(tmp_path):
    model = make_random_model(tmp_path / "model", 24e6)
    size = (model / "model.safetensors").stat().st_size
    found = measure_memory(model)
    assert set(found) == {"holder", "receiver"}
    assert all(0 <= one.process + one.daemon < SPARE_BYTES for one in found.values())
    resumed = measure_resume(model)
    assert size / 3 < resumed.after.kept < size
    assert 0 <= resumed.twice < size / 2
