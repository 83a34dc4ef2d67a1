"""What is announced for blocks on flash follows what served iterations take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.costs.cost_model import ComputeSpeed, FlashCostModel, MachineSpeed, StreamedCosts
from swarm.server.throughput.flash_calibration import BATCH_TOKENS, MIN_ITERATIONS, FlashCalibration


class Drive:
    """A gigabyte a second."""

    def seconds(self, reads: float, bytes_each: float) -> float:
        return reads * bytes_each / 1e9


@pytest.fixture
def costs() -> FlashCostModel:
    speed = ComputeSpeed(((1, 1e-10),))
    return FlashCostModel(MachineSpeed(Drive(), speed, speed), [StreamedCosts(10**6, 10**8)] * 3)


def test_at_first_the_model_is_believed(costs):
    calibration = FlashCalibration(costs)
    assert calibration.throughput.decode == pytest.approx(3 * costs.tokens_per_second())
    assert calibration.throughput.forward == pytest.approx(3 * BATCH_TOKENS / costs.prompt(BATCH_TOKENS).seconds)


def test_then_what_was_served(costs):
    calibration = FlashCalibration(costs)
    alone, together = costs.step().seconds, costs.step(sessions=4).seconds
    for count in range(MIN_ITERATIONS):
        assert calibration.throughput.decode == pytest.approx(3 / alone)
        sessions, predicted = [(1, alone), (4, together)][count % 2]
        calibration.on_iteration(sessions, sessions, 2 * predicted)
    assert calibration.throughput.decode == pytest.approx(3 / alone / 2)
    assert calibration.throughput.forward == pytest.approx(3 * BATCH_TOKENS / costs.prompt(BATCH_TOKENS).seconds)


def test_batches_have_a_correction_of_their_own(costs):
    calibration = FlashCalibration(costs)
    for _ in range(MIN_ITERATIONS):
        calibration.on_iteration(1, 100, 5 * costs.prompt(100).seconds)
    assert calibration.throughput.forward == pytest.approx(3 * BATCH_TOKENS / costs.prompt(BATCH_TOKENS).seconds / 5)
    assert calibration.throughput.decode == pytest.approx(3 * costs.tokens_per_second())


def test_a_few_candidates_are_neither(costs):
    calibration = FlashCalibration(costs)
    before = calibration.throughput
    for _ in range(2 * MIN_ITERATIONS):
        calibration.on_iteration(2, 10, 100.0)
    assert calibration.throughput == before


@given(st.floats(0.1, 10), st.lists(st.floats(10, 1000), max_size=20))
def test_a_machine_that_changes_is_followed_and_outliers_are_not(slowness, outliers):
    speed = ComputeSpeed(((1, 1e-10),))
    costs = FlashCostModel(MachineSpeed(Drive(), speed, speed), [StreamedCosts(10**6, 10**8)])
    calibration, alone = FlashCalibration(costs), costs.step().seconds
    for _ in range(200):
        calibration.on_iteration(1, 1, 3 * alone)
    for _ in range(100):
        calibration.on_iteration(1, 1, slowness * alone)
    for seconds in outliers:
        calibration.on_iteration(1, 1, seconds)
    assert calibration.throughput.decode == pytest.approx(1 / alone / slowness)
