from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from swarm.data_structures import Span, StepLayout
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.server.throughput import compute_measurement as throughput
from swarm.server.throughput.compute_measurement import (
    BATCH_TOKENS,
    MAX_DECODE_S,
    MAX_FORWARD_S,
    MEASURED_STEPS,
    SEQUENCE_TOKENS,
    WARM_UP_STEPS,
    Throughput,
    determine_throughput,
    measure_throughput,
)
from tests import zoo


def load(family: str, folder, **options) -> SpanModel:
    options = {"dtype": torch.float32, "device": torch.device("cpu"), **options}
    return load_span(open_checkpoint(zoo.make_checkpoint(family, folder)), Span(0, 3), **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load("llama", tmp_path_factory.mktemp("checkpoint"))


class Computer:
    """Stands in for the span: each kind of work takes as long as it says."""

    def __init__(self, model, monkeypatch, step, token):
        self.now = 0.0
        self.batches: list[int] = []
        self.steps = 0
        self._step, self._token = step, token
        monkeypatch.setattr(model, "forward", self.forward)
        monkeypatch.setattr(throughput, "SessionCache", lambda model: SimpleNamespace(step=self.step))
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 1.8e9))

    def step(self, hidden, layout):
        assert (len(hidden), layout) == (1, StepLayout((self.steps,), (1,)))
        self.steps += 1
        self.now += self._step(self.steps)

    def forward(self, hidden):
        rows, length, _ = hidden.shape
        assert length <= SEQUENCE_TOKENS
        self.batches.append(rows * length)
        self.now += self._token * rows * length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_a_real_span_has_positive_finite_rates(family, dtype, tmp_path):
    found = measure_throughput(load(family, tmp_path, dtype=dtype))
    for rate in (found.decode, found.forward):
        assert math.isfinite(rate)
        assert rate > 0


def test_a_decode_step_is_the_median_of_the_warm_ones(model, monkeypatch):
    # The warm-up is slow and one step is interrupted; the others take 0.05 s for three blocks.
    durations = [0.3] * WARM_UP_STEPS + [0.05] * (MEASURED_STEPS - 1) + [60.0]
    computer = Computer(model, monkeypatch, lambda number: durations[number - 1], 1e-3)
    assert measure_throughput(model).decode == pytest.approx(3 / 0.05)
    assert computer.steps == WARM_UP_STEPS + MEASURED_STEPS


@pytest.mark.parametrize("seconds", [0.2, 0.6, 30.0])
def test_a_slow_machine_makes_fewer_steps_but_never_counts_the_first(model, monkeypatch, seconds):
    computer = Computer(model, monkeypatch, lambda number: 1e3 if number == 1 else seconds, 1e-3)
    assert measure_throughput(model).decode == pytest.approx(3 / seconds)
    assert computer.steps == 2  # the first alone is over the budget
    computer = Computer(model, monkeypatch, lambda number: seconds, 1e-3)
    assert measure_throughput(model).decode == pytest.approx(3 / seconds)
    assert (computer.steps - 1) * seconds <= max(MAX_DECODE_S, seconds)


@pytest.mark.parametrize("token", [1e-9, 1e-5, 1e-4, 1e-3, 0.02, 5.0])
def test_batches_grow_as_far_as_the_budget_goes(model, monkeypatch, token):
    computer = Computer(model, monkeypatch, lambda number: 0.001, token)
    assert measure_throughput(model).forward == pytest.approx(3 / token)
    assert computer.batches == sorted(computer.batches)
    assert set(computer.batches) <= set(BATCH_TOKENS)
    assert sum(computer.batches) * token <= max(2 * MAX_FORWARD_S, BATCH_TOKENS[0] * token)
    if token <= 1e-4:
        assert computer.batches[-1] == BATCH_TOKENS[-1]


def test_a_model_with_few_positions_gets_short_rows(model, monkeypatch):
    monkeypatch.setattr(model, "positions", 10)
    rows = []
    monkeypatch.setattr(model, "forward", lambda hidden: rows.append(hidden.shape[1]))
    found = measure_throughput(model)
    assert max(rows) == 10
    assert math.isfinite(found.forward)


@pytest.mark.parametrize("fits", [0, 16, 300])
def test_a_batch_that_does_not_fit_into_memory_is_not_needed(model, monkeypatch, fits):
    computer = Computer(model, monkeypatch, lambda number: 0.01, 1e-4)
    whole = computer.forward

    def forward(hidden):
        if hidden.shape[0] * hidden.shape[1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole(hidden)

    monkeypatch.setattr(model, "forward", forward)
    expected = 3 / 1e-4 if fits else 3 / 0.01
    found = measure_throughput(model)
    assert (found.decode, found.forward) == (pytest.approx(3 / 0.01), pytest.approx(expected))


def test_tokens_differ_so_that_they_go_to_different_experts(model, monkeypatch):
    batches, steps = [], []
    monkeypatch.setattr(model, "forward", batches.append)
    stands_in = SimpleNamespace(step=lambda hidden, layout: steps.append(hidden))
    monkeypatch.setattr(throughput, "SessionCache", lambda model: stands_in)
    measure_throughput(model)
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(batches[-1][0, 0], batches[-1][-1, -1])


def test_what_was_given_counts_for_both_rates_and_nothing_is_measured(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(throughput, "measure_throughput", lambda model, progress: Throughput(10.0, 100.0))
    for given, expected, source in [
        (None, (10.0, 100.0), "measured, while others used 0% of the processors"),
        (12.5, (12.5, 12.5), "as given"),
    ]:
        assert determine_throughput(given, model) == Throughput(*expected)
        message = caplog.records[-1].getMessage()
        assert message.startswith("Throughput: ")
        assert message.endswith(f"; {source}")
