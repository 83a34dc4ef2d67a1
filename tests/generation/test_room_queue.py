"""Turns of texts that wait for room at the servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.generation.room_queue import RoomPlace, RoomQueue, next_place


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50)), min_size=1, max_size=20, unique_by=lambda one: one[1]
    )
)
def test_owners_take_turns_and_their_texts_come_in_order(texts):
    waiting = [RoomPlace(owner, number) for owner, number in texts]
    last_turns: dict[str, int] = {}
    served: list[RoomPlace] = []
    while (place := next_place(waiting, last_turns)) is not None:
        waiting.remove(place)
        served.append(place)
        last_turns[place.owner] = len(served)
    for owner in "abc":
        numbers = [place.number for place in served if place.owner == owner]
        assert numbers == sorted(numbers)
    for place, following in pairwise(served):
        left = served[served.index(following) :]
        assert following.owner != place.owner or {one.owner for one in left} == {place.owner}


def opened(queue: RoomQueue, stack: ExitStack, owner: str = "") -> tuple[RoomPlace, Callable[[], None]]:
    """A place in a queue, and what leaves it."""
    inner = stack.enter_context(ExitStack())
    return inner.enter_context(queue.place(owner, queue.next_number())), inner.close


def test_one_asks_at_a_time():
    queue = RoomQueue()
    with ExitStack() as stack:
        assert queue.is_empty
        first, leave_first = opened(queue, stack)
        second, leave_second = opened(queue, stack)
        assert (first.turn.done(), second.turn.done(), queue.is_empty) == (True, False, False)
        leave_first()
        assert second.turn.done()
        leave_second()
        assert queue.is_empty


@pytest.mark.parametrize("gone_before_its_turn", [True, False])
def test_a_cancelled_text_does_not_keep_the_turn(gone_before_its_turn):
    queue = RoomQueue()
    with ExitStack() as stack:
        _, leave = opened(queue, stack)
        gone, leave_gone = opened(queue, stack)
        last, _ = opened(queue, stack)
        assert gone.turn.cancel()
        first, second = (leave_gone, leave) if gone_before_its_turn else (leave, leave_gone)
        first()
        assert not last.turn.done()
        second()
        assert last.turn.done()
