"""How often clients may make a server dial others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.server.sessions.pushing.dial_budget import (
    BURST,
    KNOWN_COST,
    KNOWN_S,
    MAX_PENDING,
    MAX_PENDING_OF_CLIENT,
    MAX_REMEMBERED,
    PER_S,
    DialBudget,
)


def test_a_client_runs_out_and_recovers():
    budget, made = DialBudget(), 0
    for number in range(1000):
        dial = budget.begin("client", f"peer {number}", 0.0)
        if dial is not None:
            made += 1
            dial.end()
    assert made == BURST
    assert budget.begin("client", "another", 0.9 / PER_S) is None
    assert budget.begin("other client", "another", 0.9 / PER_S) is not None
    assert budget.begin("client", "another", 1.0 / PER_S) is not None


def test_a_peer_that_was_reached_costs_little():
    budget = DialBudget()
    first = budget.begin("client", "peer", 0.0)
    assert first is not None
    first.end(0.0)
    made = 0
    while (dial := budget.begin("client", "peer", 0.0)) is not None:
        dial.end(0.0)
        made += 1
    assert made == (BURST - 1) / KNOWN_COST
    made = 0
    while (dial := budget.begin("other client", "peer", KNOWN_S)) is not None:  # known no longer
        dial.end()
        made += 1
    assert made == BURST


def test_only_so_many_at_a_time():
    budget = DialBudget()
    mine = [budget.begin("client", f"peer {number}", 0.0) for number in range(MAX_PENDING_OF_CLIENT)]
    assert budget.begin("client", "another", 0.0) is None
    assert mine[0] is not None
    mine[0].end()
    mine[0].end()  # only the first one counts
    assert budget.begin("client", "another", 0.0) is not None
    assert budget.begin("client", "a third", 0.0) is None
    others = [budget.begin(f"client {number}", "peer", 0.0) for number in range(MAX_PENDING)]
    assert sum(dial is not None for dial in others) == MAX_PENDING - MAX_PENDING_OF_CLIENT


def test_a_client_does_not_name_itself():
    assert DialBudget().begin("client", "client", 0.0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.floats(0, 5), st.sampled_from([None, 1])), max_size=200
    )
)
def test_what_a_client_gets_is_bounded_by_the_time(dials):
    budget, now, spent = DialBudget(), 0.0, {"a": 0.0, "b": 0.0}
    known: set[int] = set()
    for client, peer, pause, reached in dials:
        now += pause
        dial = budget.begin(client, f"peer {peer}", now)
        if dial is not None:
            spent[client] += KNOWN_COST if peer in known else 1.0
            dial.end(None if reached is None else now)
            if reached is not None:
                known.add(peer)
        assert spent[client] <= BURST + now * PER_S + 1e-6


def test_it_does_not_grow_without_bound():
    budget = DialBudget()
    for number in range(MAX_REMEMBERED + 10):
        dial = budget.begin(f"client {number}", f"peer {number}", 0.0)
        assert dial is not None
        dial.end(0.0)
    assert len(budget._accounts) == len(budget._reached) == MAX_REMEMBERED
    assert not budget._pending
