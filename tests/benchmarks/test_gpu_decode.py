"""The benchmark of decode steps on a GPU, tried on a CPU, and what it says where there is none."""

from __future__ import annotations

import statistics
import sys

import pytest
import torch

from benchmarks.decoding import gpu_decode
from benchmarks.decoding.gpu_decode import Result, bandwidth, make_checkpoint, measure, report

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_decode"])
    gpu_decode.main()
    assert capsys.readouterr().out == "gpu_decode: not measured: no GPU here\n"


def test_it_measures_every_form_and_batch(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_decode.LARGE, "cpu", 1 << 20)
    checkpoint = make_checkpoint(tmp_path, hidden=64, intermediate=128, heads=4, blocks=1)
    results = measure(checkpoint, CPU, ("none", "int8", "nf4"), (1, 3), past=4, steps=3)
    assert [(one.form, one.batch) for one in results] == [
        (form, batch) for form in ("none", "int8", "nf4") for batch in (1, 3)
    ]
    for one in results:
        assert len(one.steps) == 3
        assert all(seconds > 0 for seconds in one.steps)
        assert one.way.startswith("contiguous cache, ")
    none, int8, nf4 = (results[place].weights for place in (0, 2, 4))
    assert none >= 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert nf4 < int8 < none
    assert results[0].reading / results[2].reading == pytest.approx(none / int8)  # one bandwidth for all
    assert len(report(results).splitlines()) == 2 + 6


def test_a_ratio_is_the_median_step_beside_reading_the_weights():
    result = Result("none", "pages, graphs", 1, 1000, 0.001, [0.0016, 0.0012, 0.0014])
    assert result.ratio == pytest.approx(1.4)
    assert "| 1.40 | 1.5: met |" in report([result])
    missed = Result("nf4", "contiguous cache, plain forward", 1, 1000, 0.001, [0.0016])
    assert "| 1.60 | 1.5: missed |" in report([missed])
    assert statistics.median(result.steps) == 0.0014


def test_bandwidth_counts_bytes(monkeypatch):
    """A copy reads and writes; a sum reads."""
    monkeypatch.setitem(gpu_decode.LARGE, "cpu", 1 << 20)
    times = iter([2.0] * 5 + [0.5] * 5)
    monkeypatch.setattr(gpu_decode, "_seconds", lambda function, device: next(times))
    assert bandwidth(CPU) == (1 << 20) / 0.5
    times = iter([1.0] * 5 + [1.0] * 5)
    assert bandwidth(CPU) == 2 * (1 << 20)
