"""Looks that cannot save time are not taken."""

from __future__ import annotations

from swarm.client.early_exit.look_meter import MIN_GAIN, TRIED_EVERY, LookMeter


def seen(look_s: float, lag_s: float) -> LookMeter:
    meter = LookMeter()
    for _ in range(50):
        meter.on_look(look_s)
        meter.on_answer(lag_s)
    return meter


def test_what_was_not_measured_is_tried():
    meter = LookMeter()
    assert meter.is_worth_looking()
    meter.on_look(1.0)
    assert meter.is_worth_looking()


def test_far_servers_are_worth_it_and_near_ones_only_now_and_then():
    assert all(seen(0.001, MIN_GAIN * 0.001).is_worth_looking() for _ in range(50))
    near = seen(0.001, 0.5 * MIN_GAIN * 0.001)
    assert sum(near.is_worth_looking() for _ in range(10 * TRIED_EVERY)) == 10


def test_a_network_that_becomes_slow_is_noticed():
    meter = seen(0.001, 0.0)
    for _ in range(20):
        meter.on_answer(0.1)
    assert meter.is_worth_looking()
