from __future__ import annotations

import math

import pytest
import torch

from swarm.data_structures import Span
from swarm.models.checkpoint import open_checkpoint
from swarm.models.span import load_span
from swarm.server import throughput
from swarm.server.throughput import STEPS, WARM_UP, measure_throughput
from tests import zoo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    return load_span(open_checkpoint(folder), Span(0, 3), dtype=torch.float32, device=torch.device("cpu"))


def test_a_real_span_has_a_positive_finite_throughput(model):
    rate = measure_throughput(model)
    assert math.isfinite(rate)
    assert rate > 0


def test_it_is_the_median_step_in_blocks_per_second(model, monkeypatch):
    # The warm-up is slow and one step is interrupted; the others take 0.5 s for three blocks.
    durations = iter([9.0] * WARM_UP + [0.5] * (STEPS - 1) + [60.0])
    clock = [0.0]

    def forward(hidden, cache):
        assert hidden.shape == (1, 1, model.hidden_size)
        clock[0] += next(durations)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    assert measure_throughput(model) == pytest.approx(3 / 0.5)
    assert next(durations, None) is None
