"""The queue in which keys take turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.admission.fair_queue import FairQueue


def fill(words):
    turns = FairQueue()
    for word in words.split():
        turns.push(word[0], word)
    return turns


def pop(turns):
    """The next one, which is also what was announced."""
    first = turns.first()
    assert turns.pop() is first
    return first


@pytest.mark.parametrize(
    ("come", "go"),
    [("a1 a2 a3", "a1 a2 a3"), ("a1 a2 a3 b1", "a1 b1 a2 a3"), ("a1 a2 b1 c1 b2", "a1 b1 c1 a2 b2"), ("", "")],
)
def test_keys_take_turns(come, go):
    turns = fill(come)
    assert " ".join(pop(turns) for _ in range(len(turns))) == go


def test_removed_items_are_not_next():
    turns = fill("a1 a2 b1")
    turns.remove("a", "a1")
    turns.remove("a", "a1")
    turns.remove("c", "c1")
    assert len(turns) == 2
    assert [turns.pop(), turns.pop()] == ["a2", "b1"]


def test_the_newest_request_of_the_longest_queue_gives_way():
    turns = fill("a1 b1 b2 b3 c1")
    assert turns.longest_key() == "b"
    assert turns.pop_newest("b") == "b3"
    assert (turns.count_of("b"), turns.count_of("d"), len(turns)) == (2, 0, 4)


@given(st.lists(st.tuples(st.sampled_from(["push", "pop"]), st.sampled_from("abc")), max_size=60))
def test_every_other_key_goes_before_a_waiting_request_at_most_once(steps):
    turns: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, int] = dict.fromkeys("abc", 0)
    passed: dict[str, dict[str, int]] = {}
    for number, (what, name) in enumerate(steps):
        if what == "push":
            turns.push(name, (name, number))
            waiting[name] += 1
            passed.setdefault(name, {})
        elif len(turns):
            gone, _ = turns.pop()
            waiting[gone] -= 1
            passed.pop(gone)
            for other in passed.values():
                other[gone] = other.get(gone, 0) + 1
                assert other[gone] == 1
            if waiting[gone]:
                passed[gone] = {}
        assert len(turns) == sum(waiting.values())
