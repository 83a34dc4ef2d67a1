"""Events of sessions, counted."""

from __future__ import annotations

from typing import get_args

import pytest

from swarm.client.routes import events
from swarm.data_structures import Route, Span
from swarm.errors import CacheFull, PeerTimeout
from swarm.metrics.client import BAN_REASONS, ClientMetrics
from swarm.metrics.registry import Registry, encode_metrics
from swarm.routing.peer_health import PeerFailure
from tests.metrics.readings import Readings, parse, value

SPAN = Span(2, 4)


def heard(*happened: events.SessionEvent) -> Readings:
    registry = Registry()
    metrics = ClientMetrics(registry)
    for event in happened:
        metrics.on_event(event)
    return parse(encode_metrics(registry)[0].decode())


def test_an_answer_with_a_failover() -> None:
    readings = heard(
        events.RouteTaken(Route()),
        events.HopLost("peer", SPAN, PeerTimeout.code),
        events.PeerAvoided("peer", PeerFailure.TIMED_OUT.value, 15.0),
        events.BlocksMissing((2, 3)),
        events.RouteTaken(Route()),
        events.Replayed(SPAN, 57),
        events.Recovered(0.07),
    )
    assert value(readings, "swarm_client_routes_total") == 2
    assert value(readings, "swarm_client_hops_lost_total", code="peer_timeout") == 1
    assert value(readings, "swarm_client_bans_total", reason="timed_out") == 1
    assert value(readings, "swarm_client_missing_blocks_total") == 1
    assert value(readings, "swarm_client_replays_total") == 1
    assert value(readings, "swarm_client_replayed_tokens_total") == 57
    assert value(readings, "swarm_client_failover_seconds_count") == 1
    assert value(readings, "swarm_client_failover_seconds_sum") == pytest.approx(0.07)
    assert value(readings, "swarm_client_failover_seconds_bucket", le="0.05") == 0
    assert value(readings, "swarm_client_failover_seconds_bucket", le="0.1") == 1


def test_tokens_that_left_early() -> None:
    readings = heard(
        events.ExitTaken(4),
        events.ExitTaken(8),
        events.ExitTaken(4),
        events.ExitVerified(4, True),
        events.ExitVerified(4, False),
    )
    assert value(readings, "swarm_client_exits_total", block="4") == 2
    assert value(readings, "swarm_client_exits_total", block="8") == 1
    assert value(readings, "swarm_client_exits_verified_total", block="4", outcome="stood") == 1
    assert value(readings, "swarm_client_exits_verified_total", block="4", outcome="given_up") == 1


def test_audits() -> None:
    audits = [events.Audited("peer", SPAN, agreed, 0.5) for agreed in (True, False, True)]
    readings = heard(*audits)
    assert value(readings, "swarm_client_audits_total", outcome="agreed") == 2
    assert value(readings, "swarm_client_audits_total", outcome="differed") == 1


def test_every_event_has_its_count() -> None:
    metrics = ClientMetrics(Registry())
    assert {event.__name__ for event in get_args(events.SessionEvent)} == set(metrics._by_event)


def test_every_reason_has_its_label() -> None:
    assert set(BAN_REASONS) == {failure.value for failure in PeerFailure}


def test_labels_do_not_grow() -> None:
    """A reason may hold what a peer wrote."""
    readings = heard(
        *(events.HopLost("peer", SPAN, f"reason {number}") for number in range(100)),
        *(events.PeerAvoided("peer", f"reason {number}", 1.0) for number in range(100)),
        events.HopLost("peer", SPAN, CacheFull.code),
    )
    assert value(readings, "swarm_client_hops_lost_total", code="other") == 100
    assert value(readings, "swarm_client_hops_lost_total", code="cache_full") == 1
    assert value(readings, "swarm_client_bans_total", reason="other") == 100
    assert not any("peer" in label for _, labels in readings for pair in labels for label in pair)
