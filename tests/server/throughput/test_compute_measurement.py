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
    determine_throughput,
    measure_throughput,
)
from swarm.server.throughput.throughput_cache import Throughput, ThroughputOption
from tests import zoo

AUTO, AGAIN = ThroughputOption(), ThroughputOption(remeasure=True)


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
    assert measure_throughput(model) == Throughput(pytest.approx(3 / 0.01), pytest.approx(expected))


def test_tokens_differ_so_that_they_go_to_different_experts(model, monkeypatch):
    batches, steps = [], []
    monkeypatch.setattr(model, "forward", batches.append)
    stands_in = SimpleNamespace(step=lambda hidden, layout: steps.append(hidden))
    monkeypatch.setattr(throughput, "SessionCache", lambda model: stands_in)
    measure_throughput(model)
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(batches[-1][0, 0], batches[-1][-1, -1])


@pytest.fixture
def measured(monkeypatch):
    """Counts the measurements, each of which finds something else."""
    found = []

    def fake(model, progress):
        found.append(Throughput(10.0 + len(found), 100.0))
        return found[-1]

    monkeypatch.setattr(throughput, "measure_throughput", fake)
    return found


def test_what_was_measured_once_is_not_measured_again_unless_asked_for(model, measured, tmp_path):
    cache = tmp_path / "throughput.json"
    first = determine_throughput(AUTO, model, "model", "main", cache=cache)
    assert determine_throughput(AUTO, model, "model", "main", cache=cache) == first
    assert len(measured) == 1
    again = determine_throughput(AGAIN, model, "model", "main", cache=cache)
    assert again != first
    assert determine_throughput(AUTO, model, "model", "main", cache=cache) == again
    assert len(measured) == 2


def test_under_other_conditions_it_is_measured(model, measured, tmp_path, monkeypatch):
    cache = tmp_path / "throughput.json"

    def ask(span=model, name="model", revision="main", **options):
        determine_throughput(AUTO, span, name, revision, cache=cache, **options)
        return len(measured)

    assert ask() == 1
    assert ask(name="other") == 2
    assert ask(revision="other") == 3
    assert ask(quantization="int8") == 4
    assert ask(span=model.narrowed(Span(0, 2))) == 5
    assert ask() == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert ask() == 6
    monkeypatch.setattr(throughput, "_processor", lambda: "another processor")
    assert ask() == 7
    monkeypatch.setattr(throughput, "VERSION", "another version")
    assert ask() == 8
    monkeypatch.setattr(model, "dtype", torch.float16)
    assert ask() == 9
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert ask() == 10
    assert ask() == 10


def test_without_a_file_nothing_is_remembered(model, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for count in (1, 2):
        determine_throughput(AUTO, model, "model", "main")
        assert len(measured) == count
    assert not list(tmp_path.iterdir())


def test_a_number_counts_for_both_rates_and_nothing_is_measured_or_kept(model, measured, tmp_path):
    cache = tmp_path / "throughput.json"
    assert determine_throughput(ThroughputOption(12.5), model, "model", "main", cache=cache) == Throughput(12.5, 12.5)
    assert not measured
    assert not cache.exists()


def test_the_log_says_where_the_figure_comes_from(model, measured, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for wanted, source in [
        (AUTO, "measured"),
        (AUTO, "measured before; --throughput measure does it again"),
        (AGAIN, "measured"),
        (ThroughputOption(6.0), "as given"),
    ]:
        caplog.clear()
        determine_throughput(wanted, model, "model", "main", cache=tmp_path / "throughput.json")
        [message] = [record.getMessage() for record in caplog.records]
        assert message.startswith("Throughput: ")
        assert message.endswith(f"; {source}")
