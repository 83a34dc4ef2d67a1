from __future__ import annotations

import pytest

from swarm.planning.simulation.virtual_clock import VirtualClock


def test_things_happen_in_order_and_those_of_one_time_as_asked_for():
    clock, happened = VirtualClock(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "too late")):
        clock.call_at(time, lambda name=name: happened.append((clock.now, name)))
    clock.run_until(5.0)
    assert happened == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert clock.now == 5.0


@pytest.mark.parametrize("seconds", [0.0, -3.0])
def test_what_is_due_in_the_past_happens_now(seconds):
    clock, happened = VirtualClock(), []
    clock.call_at(1.0, lambda: clock.call_after(seconds, lambda: happened.append(clock.now)))
    clock.run_until(2.0)
    assert happened == [1.0]
