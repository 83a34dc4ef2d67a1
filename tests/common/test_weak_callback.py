"""Callbacks that do not keep alive whom they call."""

from __future__ import annotations

import weakref

import pytest

from swarm.common.weak_callback import weak_callback


class Owner:
    def __init__(self) -> None:
        self.callback = weak_callback(self.double, -1)

    def double(self, number: int, *, more: int = 0) -> int:
        if number < 0:
            raise ValueError("negative")
        return 2 * number + more


def test_it_calls_while_the_owner_lives():
    owner = Owner()
    assert owner.callback(4, more=1) == 9
    with pytest.raises(ValueError, match="negative"):
        owner.callback(-1)


def test_it_keeps_nobody_alive():
    owner = Owner()
    callback, alive = owner.callback, weakref.ref(owner)
    del owner
    assert alive() is None
    assert callback(4) == -1


def test_a_callback_that_only_its_owner_uses_needs_no_other_answer():
    owner = Owner()
    callback = weak_callback(owner.double)
    assert callback(1) == 2
    del owner
    with pytest.raises(ReferenceError, match="is gone"):
        callback(1)
