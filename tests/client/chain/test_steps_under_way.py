"""Numbers and epochs of the steps that are under way."""

from __future__ import annotations

import torch

from swarm.client.chain.steps_under_way import StepsUnderWay
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import StepLayout, WireFormat


def part(start: int, count: int = 1, sources: tuple[int, ...] | None = None) -> tuple[PackedHidden, StepLayout]:
    payload = torch.zeros(count, 4).numpy().tobytes()
    return PackedHidden(payload, count, 4, WireFormat.NONE, "float32"), StepLayout((start,), (count,), sources)


def test_steps_that_continue_share_an_epoch():
    steps = StepsUnderWay()
    assert [(one.number, one.epoch) for one in steps.add([part(0, 3), part(3)])] == [(0, 0), (1, 0)]
    assert steps.appends(StepLayout((4,), (1,)))
    assert not steps.appends(StepLayout((3,), (1,)))
    assert [(one.number, one.epoch) for one in steps.add([part(2), part(3)])] == [(2, 2), (3, 2)]
    assert [(one.number, one.epoch) for one in steps.add([part(4, 1, (0,))])] == [(4, 4)]


def test_what_follows_steps_that_were_given_up_is_an_epoch_of_its_own():
    steps = StepsUnderWay()
    steps.add([part(0, 3)])
    steps.add([part(3), part(4), part(5)])
    assert [one.number for one in steps.give_up_after(1)] == [2, 3]
    assert list(steps.steps) == [0, 1]
    assert not steps.appends(StepLayout((4,), (1,))), "some servers may have more"
    assert [(one.number, one.epoch) for one in steps.add([part(4)])] == [(4, 4)]


def test_the_first_step_of_an_epoch_names_the_one_before_it_that_stands():
    steps = StepsUnderWay()
    assert [one.follows for one in steps.add([part(0, 3), part(3)])] == [None, None]
    assert [one.follows for one in steps.add([part(2), part(3)])] == [1, None]
    assert [one.follows for one in steps.add([part(4)])] == [None]
    steps.give_up_after(2)
    steps.give_up_after(2)
    assert [one.follows for one in steps.add([part(1)])] == [2]
    steps.forget(5)
    assert not steps.steps
    steps.add([part(0)])
    steps.give_up_after(5)
    (last,) = steps.add([part(0)])
    assert (last.number, last.follows) == (7, 5)


def test_what_comes_next():
    steps = StepsUnderWay()
    assert steps.upcoming(-1) == (0, 0)
    steps.add([part(0), part(1)])
    steps.add([part(1)])
    assert [steps.upcoming(done) for done in (-1, 0, 1, 2)] == [(0, 0), (1, 0), (2, 2), (3, 2)]
    steps.forget(1)
    assert list(steps.steps) == [2]
    hidden, _ = part(0, 3)
    steps.add([(hidden, StepLayout((2, 2, 2), (1, 1, 1), (0, 0, 0)))])
    assert [steps.rows(done) for done in (1, 2, 3)] == [3, 3, 1]


def test_a_step_keeps_where_its_token_may_leave():
    (step,) = StepsUnderWay().add([part(0)], exit_block=3)
    assert step.exit_block == 3


def test_the_callers_buffer_may_change():
    buffer = bytearray(16)
    (step,) = StepsUnderWay().add([(PackedHidden(memoryview(buffer), 1, 4, WireFormat.NONE, "float32"), part(0)[1])])
    buffer[0] = 1
    assert bytes(step.hidden.payload) == bytes(16)
