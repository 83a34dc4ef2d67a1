"""What a server does, counted; and what is told to nobody."""

from __future__ import annotations

import pytest

from swarm.data_structures import FlashUse, Span
from swarm.errors import CacheFull
from swarm.metrics.registry import Registry, encode_metrics
from swarm.metrics.server import ServerObserver
from tests.metrics.readings import Readings, parse, value


class Counted:
    """A server's metrics, and what Prometheus would read."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.metrics = ServerObserver(self.registry)

    def read(self) -> Readings:
        return parse(encode_metrics(self.registry)[0].decode())

    def value(self, name: str, **labels: str) -> float | None:
        return value(self.read(), f"swarm_server_{name}", **labels)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_what_is_told_to_nobody_is_not_counted() -> None:
    nobody = ServerObserver()
    nobody.iteration_finished([("decode", 1, 1)], 0.03)
    nobody.output_pushed(4000, arrived=True)
    nobody.session_totals(1, 300, 16384)
    nobody.span_loaded("demo", "main", "float32", "none", Span(0, 4))
    nobody.flash_used(FlashUse(read_bytes=1))


def test_an_iteration_of_several_requests(counted: Counted) -> None:
    counted.metrics.iteration_finished([("decode", 1, 1), ("decode", 3, 3), ("prefill", 1, 60)], 0.03)
    assert counted.value("tokens_total", kind="decode") == 4
    assert counted.value("tokens_total", kind="prefill") == 60
    assert counted.value("iteration_sequences_sum") == 5
    assert counted.value("iteration_tokens_sum") == 64
    assert counted.value("iteration_tokens_bucket", le="32.0") == 0
    assert counted.value("iteration_tokens_bucket", le="64.0") == 1
    assert counted.value("iteration_seconds_sum") == 0.03


def test_a_step_with_its_push(counted: Counted) -> None:
    metrics = counted.metrics
    metrics.message_received(4096)
    metrics.request_started(0.004)
    metrics.request_finished("decode", 0.006)
    metrics.output_pushed(4000, arrived=True)
    metrics.payload_sent(4000)
    metrics.output_pushed(4000, arrived=False)
    assert counted.value("received_bytes_total") == 4096
    assert counted.value("queue_seconds_sum") == 0.004
    assert counted.value("step_seconds_count", kind="decode") == 1
    assert counted.value("step_seconds_sum", kind="decode") == 0.006
    assert counted.value("sent_bytes_total") == 8000
    assert counted.value("pushes_total", outcome="sent") == 1
    assert counted.value("pushes_total", outcome="failed") == 1


def test_sessions_and_adapters(counted: Counted) -> None:
    metrics = counted.metrics
    metrics.session_opened()
    metrics.session_totals(1, 300, 16384)
    metrics.session_closed("expired")
    metrics.adapter_total(5000)
    assert counted.value("sessions_opened_total") == 1
    assert counted.value("sessions_open") == 1
    assert counted.value("cache_used_tokens") == 300
    assert counted.value("cache_capacity_tokens") == 16384
    assert counted.value("sessions_closed_total", reason="expired") == 1
    assert counted.value("adapter_bytes") == 5000


def test_errors_by_type(counted: Counted) -> None:
    for code in (CacheFull.code, CacheFull.code, "something that a peer made up"):
        counted.metrics.request_refused(code)
    assert counted.value("errors_total", code="cache_full") == 2
    assert counted.value("errors_total", code="other") == 1
