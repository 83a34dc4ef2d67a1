"""What is announced follows what iterations take, and stays where they vary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.throughput.compute_measurement import Throughput
from swarm.server.throughput.throughput_meter import BATCH_TOKENS, BUSY_SHARE, SAMPLES, TOLERANCE, ThroughputMeter

BLOCKS = 4
MEASURED = Throughput(100.0, 1000.0)


def meter_of(rates: list[float], tokens: int = 1, **options) -> ThroughputMeter:
    """A meter after iterations that went through the blocks at these rates."""
    meter = ThroughputMeter(MEASURED, BLOCKS, **options)
    for rate in rates:
        meter.record(BLOCKS, tokens, tokens * BLOCKS / rate)
    return meter


@given(st.floats(1, 1e6), st.sampled_from([1, BATCH_TOKENS, 10 * BATCH_TOKENS]))
def test_what_iterations_agree_on_is_announced_up_and_down(rate, tokens):
    announced = MEASURED.decode if tokens == 1 else MEASURED.forward
    assert meter_of([rate] * (SAMPLES - 1), tokens).current == MEASURED
    current = meter_of([rate] * SAMPLES, tokens).current
    found = current.decode if tokens == 1 else current.forward
    if announced / TOLERANCE < rate < announced * TOLERANCE:
        assert found == announced
    elif tokens == 1 or rate >= MEASURED.decode:
        assert found == pytest.approx(rate)
    assert current.forward >= current.decode, "a batch is no slower than single tokens"


@given(st.lists(st.floats(1, 1e4), min_size=SAMPLES, max_size=4 * SAMPLES))
def test_fewer_than_half_of_the_iterations_change_nothing(rates):
    rates[1::2] = [MEASURED.decode] * len(rates[1::2])
    rates[::5] = [MEASURED.decode] * len(rates[::5])
    assert meter_of(rates).current == MEASURED


@given(st.floats(10, 1e4), st.floats(0.95, 1.05))
def test_one_rate_is_taken_once(rate, noise):
    meter = meter_of([rate] * SAMPLES)
    current = meter.current
    for number in range(5 * SAMPLES):
        meter.record(BLOCKS, 1, BLOCKS / rate * (noise if number % 2 else 1 / noise))
    assert meter.current == current


def test_what_tells_nothing_is_not_counted():
    assert meter_of([1.0] * SAMPLES, is_given=True).current == MEASURED
    meter = meter_of([1.0] * SAMPLES, tokens=8)  # neither single tokens nor a batch
    for _ in range(SAMPLES):
        meter.record(BLOCKS - 1, 1, 10.0)
        meter.record(BLOCKS, 1, 0.0)
    assert meter.current == MEASURED


def test_a_disturbed_measurement_is_repeated_until_something_better_is_known():
    disturbed = Throughput(10.0, 10.0, others=2 * BUSY_SHARE)
    assert not ThroughputMeter(MEASURED, BLOCKS).should_repeat
    assert not ThroughputMeter(disturbed, BLOCKS, is_given=True).should_repeat
    meter = ThroughputMeter(disturbed, BLOCKS)
    assert meter.should_repeat
    meter.measured_again(MEASURED)
    assert (meter.current, meter.should_repeat) == (MEASURED, False)
    meter = ThroughputMeter(disturbed, BLOCKS)
    for _ in range(SAMPLES):
        meter.record(BLOCKS, 1, BLOCKS / 100)
    assert (meter.current.decode, meter.should_repeat) == (pytest.approx(100), False)
