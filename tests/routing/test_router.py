from __future__ import annotations

import random

import pytest

from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.routing.peer_health import HALF_LIFE_S, RETRY_AFTER_S, PeerFailure
from swarm.routing.router import Router
from swarm.routing.swarm_snapshot import DEFAULT_ROUND_TRIP_S
from tests.infos import server_info

WANTED = Span(0, 4)


def swarm() -> list:
    return [
        server_info(0, 2, "first-fast", throughput=100.0),
        server_info(0, 2, "first-slow", throughput=10.0),
        server_info(2, 4, "second-fast", throughput=100.0),
        server_info(2, 4, "second-slow", throughput=10.0),
    ]


def router(**options) -> Router:
    made = Router(**options)
    made.update(swarm())
    return made


def used(route) -> list[str]:
    return [hop.server.peer_id for hop in route.hops]


def test_the_best_known_servers_are_used():
    assert used(router().route(WANTED, 0.0)) == ["first-fast", "second-fast"]


def test_a_swarm_of_other_models():
    for names, said in [
        (["m"], "it serves m. A"),
        (["m", "n", "o"], "it serves m, n, o. A"),
        (["m", "n", "o", "p"], "m, n, o and 1 more"),
    ]:
        made = Router()
        made.update((), None, names)
        with pytest.raises(MissingBlocks, match=said):
            made.route(WANTED, 0.0)


def test_blocked_and_allowed_servers():
    blocked = router(blocked_servers=frozenset({"first-fast"}))
    assert used(blocked.route(WANTED, 0.0)) == ["first-slow", "second-fast"]
    allowed = router(allowed_servers=frozenset({"first-slow", "second-slow"}))
    assert used(allowed.route(WANTED, 0.0)) == ["first-slow", "second-slow"]
    both = router(allowed_servers=frozenset({"first-slow", "second-slow"}), blocked_servers=frozenset({"first-slow"}))
    with pytest.raises(MissingBlocks) as raised:
        both.route(WANTED, 0.0)
    assert raised.value.blocks == (0, 1)
    assert "…t-fast is not in allowed_servers" in str(raised.value)
    assert "…t-slow is in blocked_servers" in str(raised.value)


def test_a_server_that_failed_is_left_alone_until_its_ban_ends_and_then_has_to_be_better():
    made = router()
    until = made.health.record_failure("first-fast", PeerFailure.TIMED_OUT, 0.0)
    assert used(made.route(WANTED, 0.0)) == ["first-slow", "second-fast"]
    assert used(made.route(WANTED, until)) == ["first-fast", "second-fast"]
    for _ in range(3):
        until = made.health.record_failure("first-fast", PeerFailure.TIMED_OUT, until)
    assert used(made.route(WANTED, until)) == ["first-slow", "second-fast"]


def test_when_all_who_hold_a_block_are_banned_the_error_says_so_and_how_long():
    made = router()
    made.health.record_failure("first-fast", PeerFailure.WRONG_ANSWER, 0.0)
    made.health.record_failure("first-slow", PeerFailure.TIMED_OUT, 0.0)
    with pytest.raises(MissingBlocks) as raised:
        made.route(WANTED, 5.0)
    assert raised.value.blocks == (0, 1)
    assert "…t-fast gave a wrong answer and is avoided for 295 s more" in str(raised.value)
    assert "…t-slow did not answer in time and is avoided for 10 s more" in str(raised.value)


def test_servers_of_other_weights_are_named():
    made = Router()
    made.update([server_info(0, 2, "a")], {"peer-123456": "it serves revision old"})
    with pytest.raises(MissingBlocks, match=r"1 server\(s\) cannot be used, such as …123456: it serves revision old"):
        made.route(WANTED, 0.0)


def test_measured_round_trips_count_at_once_and_survive_a_new_view():
    made = router()
    assert used(made.route(Span(0, 2), 0.0)) == ["first-fast"]
    made.record_round_trips({"first-slow": 0.001, "first-fast": 2.0}, 0.0)
    assert used(made.route(Span(0, 2), 0.0)) == ["first-slow"]
    made.update(swarm())
    assert used(made.route(Span(0, 2), 0.0)) == ["first-slow"]
    assert made.snapshot.client_round_trip("second-fast") == DEFAULT_ROUND_TRIP_S


def test_a_part_of_a_route_between_two_servers():
    made = Router()
    made.update(
        [
            server_info(0, 2, "before", round_trips=(("near", 0.001), ("far", 3.0))),
            server_info(2, 4, "near", throughput=50.0),
            server_info(2, 4, "far", throughput=100.0),
        ]
    )
    assert used(made.route(Span(2, 4), 0.0)) == ["far"]
    assert used(made.route(Span(2, 4), 0.0, before="before", after="gone")) == ["near"]


def test_pings_go_to_the_ends_of_the_model_first_and_to_the_middle_too():
    made = Router()
    ends = [server_info(0, 2, f"first{n}") for n in range(30)] + [server_info(6, 8, f"last{n}") for n in range(30)]
    made.update([*ends, *(server_info(2, 6, f"middle{n}") for n in range(30))])
    chosen = made.candidates_to_ping(Span(0, 8), 0.0, random.Random(0), limit=16)
    assert len(set(chosen)) == len(chosen) == 16
    assert [peer_id[:4] for peer_id in chosen[:12]] == ["firs", "last"] * 6
    assert any(peer_id.startswith("middle") for peer_id in chosen)


def test_pings_depend_on_the_random_source_alone_and_reach_every_server():
    made = Router()
    made.update([server_info(0, 4, f"peer{n}", throughput=10.0 ** (n % 4)) for n in range(100)])
    assert made.candidates_to_ping(WANTED, 0.0, random.Random(1)) == made.candidates_to_ping(
        WANTED, 0.0, random.Random(1)
    )
    rng, reached, rounds = random.Random(0), set(), 0
    while len(reached) < 100:
        chosen = made.candidates_to_ping(WANTED, rounds, rng, limit=20)
        assert reached.isdisjoint(chosen)  # those not measured yet come first
        reached.update(chosen)
        made.record_round_trips(dict.fromkeys(chosen, 0.05), rounds)
        rounds += 1
    assert rounds == 5


def test_stale_measurements_are_repeated_before_fresh_ones():
    made = router()
    made.record_round_trips({"first-fast": 0.1}, 0.0)
    made.record_round_trips({"first-slow": 0.1, "second-slow": 0.1}, 300.0)
    chosen = made.candidates_to_ping(WANTED, 300.0, random.Random(0), limit=4)
    assert set(chosen[:2]) == {"first-fast", "second-fast"}
    assert set(chosen) == {server.peer_id for server in swarm()}


def test_banned_and_blocked_servers_are_not_pinged():
    made = router(blocked_servers=frozenset({"second-slow"}))
    made.health.record_failure("first-slow", PeerFailure.UNREACHABLE, 0.0)
    assert set(made.candidates_to_ping(WANTED, 0.0, random.Random(0))) == {"first-fast", "second-fast"}
    assert Router().candidates_to_ping(WANTED, 0.0, random.Random(0)) == []


def test_a_batch_is_split_with_the_same_knowledge():
    made = Router()
    made.update([server_info(0, 4, f"peer{n}", throughput=100.0) for n in range(3)])
    made.health.record_failure("peer1", PeerFailure.REFUSED, 0.0)
    portions = made.split(WANTED, [100] * 10, 0.0, random.Random(0))
    assert {hop.server.peer_id for portion in portions for hop in portion.route.hops} == {"peer0", "peer2"}
    with pytest.raises(MissingBlocks, match="has just failed"):
        made.split(WANTED, [100] * 10, 0.0, random.Random(0), avoid=frozenset({"peer0", "peer2"}))


def hop_at(name: str, made: Router) -> Hop:
    server = made.snapshot.servers[made.snapshot.numbers[name]]
    return Hop(server, server.span)


def test_a_server_that_announces_too_much_loses_its_advantage_and_gets_another_chance():
    made = router()
    for _ in range(8):
        made.note_step(hop_at("first-fast", made), 0.5, 1, 0.0)
        made.note_step(hop_at("second-fast", made), 0.021, 1, 0.0)
    assert used(made.route(WANTED, 0.0)) == ["first-slow", "second-fast"]
    assert used(made.route(WANTED, 20 * HALF_LIFE_S)) == ["first-fast", "second-fast"]


def test_servers_that_are_all_slower_than_announced_are_used_as_before():
    made = router()
    for name in ("first-fast", "second-fast"):
        for _ in range(8):
            made.note_step(hop_at(name, made), 5.0, 1, 0.0)
    assert used(made.route(WANTED, 0.0)) == ["first-fast", "second-fast"]


def test_one_that_was_overtaken_once_is_avoided_at_once():
    made = router()
    for name in ("first-fast", "second-fast"):
        for _ in range(8):
            made.note_step(hop_at(name, made), 0.02, 1, 0.0)
    made.note_step(hop_at("first-fast", made), 1.0, 1, 0.0, overtaken=True)
    assert used(made.route(WANTED, 0.0)) == ["first-slow", "second-fast"]
    assert made.health.penalties(0.0) == {}
    assert made.health.banned_peers(0.0) == frozenset()


def test_an_alternative_is_without_the_servers_and_says_what_both_take():
    made = router()
    current = Route((hop_at("first-fast", made),))
    found = made.alternative(current, 0.0, None, "second-fast", 0)
    assert used(found.route) == ["first-slow"]
    assert found.seconds - found.current_seconds == pytest.approx(2 / 10 - 2 / 100)
    both = Route((hop_at("first-fast", made), hop_at("second-fast", made)))
    assert used(made.alternative(both, 0.0, None, None, 0).route) == ["first-slow", "second-slow"]
    made.health.record_failure("first-slow", PeerFailure.TIMED_OUT, 0.0)
    assert made.alternative(current, 0.0, None, "second-fast", 0) is None


def test_a_home_that_could_not_be_reached_is_used_all_the_same_where_there_is_no_other():
    made = Router()
    made.update([server_info(0, 4, "only")])
    made.health.record_failure("only", PeerFailure.UNREACHABLE, 0.0)
    with pytest.raises(MissingBlocks):  # it is not at home, but gone
        made.route(WANTED, RETRY_AFTER_S)
    made = Router()
    made.update([server_info(0, 4, "only", relayed=True)])
    made.health.record_failure("only", PeerFailure.UNREACHABLE, 0.0)
    with pytest.raises(MissingBlocks, match="could not be reached and is avoided"):
        made.route(WANTED, 1.0)
    assert used(made.route(WANTED, RETRY_AFTER_S)) == ["only"]
    with pytest.raises(MissingBlocks):
        made.route(WANTED, RETRY_AFTER_S, avoid=frozenset({"only"}))
    made.update([server_info(0, 4, "only", throughput=1e6, relayed=True), server_info(0, 4, "other")])
    assert used(made.route(WANTED, RETRY_AFTER_S)) == ["other"]


def test_servers_push_unless_one_has_lied_or_the_way_over_the_client_is_shorter():
    a = server_info(0, 2, "a", round_trips=(("b", 0.5),))
    made = Router()
    made.update([a, server_info(2, 4, "b")])
    assert made.may_push("a", "b", 0.0)
    made.record_round_trips({"a": 0.02, "b": 0.02}, 0.0)
    assert not made.may_push("a", "b", 0.0)
    made.record_round_trips({"a": 5.0, "b": 5.0}, 0.0)
    assert made.may_push("a", "b", 0.0)
    made.links.distrust("a", "b", 0.0)
    assert not made.may_push("a", "b", 0.0)
