"""How often clients may make a server dial others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.messages import MAX_PEER_SESSIONS
from swarm.server.sessions.push_link import (
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
            dial.give_up()
    assert made == BURST
    assert budget.begin("client", "another", 0.9 / PER_S) is None
    assert budget.begin("other client", "another", 0.9 / PER_S) is not None
    assert budget.begin("client", "another", 1.0 / PER_S) is not None


def reach(budget, client, peer, now=0.0):
    dial = budget.begin(client, peer, now)
    assert dial is not None
    dial.reached(now)


def test_a_peer_that_was_reached_costs_little():
    budget = DialBudget()
    reach(budget, "client", "peer")
    made = 0
    while (dial := budget.begin("client", "peer", 0.0)) is not None:
        dial.reached(0.0)
        made += 1
    assert made == (BURST - 1) / KNOWN_COST
    made = 0
    while (dial := budget.begin("other client", "peer", KNOWN_S)) is not None:  # known no longer
        dial.give_up()
        made += 1
    assert made == BURST


def test_only_so_many_at_a_time():
    budget = DialBudget()
    mine = [budget.begin("client", f"peer {number}", 0.0) for number in range(MAX_PENDING_OF_CLIENT)]
    assert budget.begin("client", "another", 0.0) is None
    assert mine[0] is not None
    mine[0].give_up()
    mine[0].failed()  # only the first end counts
    assert budget.begin("client", "another", 0.0) is not None
    assert budget.begin("client", "a third", 0.0) is None
    others = [budget.begin(f"client {number}", "peer", 0.0) for number in range(MAX_PENDING)]
    assert sum(dial is not None for dial in others) == MAX_PENDING - MAX_PENDING_OF_CLIENT


def test_strangers_that_wait_for_peers_that_do_not_exist_keep_nobody_from_those_that_are_known():
    budget = DialBudget(lambda peer: peer == "node of the DHT")
    reach(budget, "gateway", "server")
    for stranger in range(10):
        for number in range(MAX_PENDING_OF_CLIENT):
            budget.begin(f"stranger {stranger}", f"peer {stranger} {number}", 0.0)
    assert budget.begin("gateway", "unknown", 0.0) is None
    for server in ("server", "node of the DHT"):
        assert None not in [budget.begin("gateway", server, 0.0) for _ in range(MAX_PEER_SESSIONS)]


def test_a_peer_that_cannot_be_reached_any_more_is_unknown():
    """Otherwise somebody could take away all the peers that it had reached, and have them dialed for little."""
    budget = DialBudget()
    for number in range(MAX_PENDING_OF_CLIENT + 1):
        reach(budget, "client", f"peer {number}")
    again = [budget.begin("client", f"peer {number}", 0.0) for number in range(MAX_PENDING_OF_CLIENT + 1)]
    for dial in again:
        dial.failed()
    more = [budget.begin("client", f"peer {number}", 0.0) for number in range(MAX_PENDING_OF_CLIENT + 1)]
    assert sum(dial is not None for dial in more) == MAX_PENDING_OF_CLIENT
    # Who gives up a dial has learned nothing.
    reach(budget, "other client", "peer 0", 1.0)
    budget.begin("other client", "peer 0", 1.0).give_up()
    assert budget.begin("client", "peer 0", 1.0) is not None


def test_a_client_does_not_name_itself():
    assert DialBudget().begin("client", "client", 0.0) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 20),
            st.floats(0, 5),
            st.sampled_from(["reached", "failed", "give_up", "wait"]),
        ),
        max_size=200,
    )
)
def test_what_a_client_gets_is_bounded_by_the_time(dials):
    budget, now, spent = DialBudget(), 0.0, {"a": 0.0, "b": 0.0}
    known: set[int] = set()
    waiting: dict[str, list] = {"a": [], "b": []}
    for client, peer, pause, end in dials:
        now += pause
        dial = budget.begin(client, f"peer {peer}", now)
        if dial is not None:
            is_dialed = peer in {other for other, was_known, _ in waiting[client] if not was_known}
            spent[client] += KNOWN_COST if peer in known or is_dialed else 1.0
            if end == "reached":
                dial.reached(now)
                known.add(peer)
            elif end == "failed":
                dial.failed()
                known.discard(peer)
            elif end == "give_up":
                dial.give_up()
            else:
                waiting[client].append((peer, peer in known, dial))
        assert spent[client] <= BURST + now * PER_S + 1e-6
        assert len({other for other, was_known, _ in waiting[client] if not was_known}) <= MAX_PENDING_OF_CLIENT
    for _, _, dial in [*waiting["a"], *waiting["b"]]:
        dial.give_up()
    assert not budget._pending


def test_it_does_not_grow_without_bound():
    budget = DialBudget()
    for number in range(MAX_REMEMBERED + 10):
        reach(budget, f"client {number}", f"peer {number}")
    assert len(budget._accounts) == len(budget._reached) == MAX_REMEMBERED
    assert not budget._pending
