"""Requests and answers of a gateway, counted."""

from __future__ import annotations

import pytest

from swarm.metrics.gateway import GatewayMetrics, endpoint_label
from swarm.metrics.registry import Registry, encode_metrics
from tests.metrics.readings import Readings, parse, value


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def metrics(registry: Registry) -> GatewayMetrics:
    return GatewayMetrics(registry, ["demo"])


def read(registry: Registry) -> Readings:
    return parse(encode_metrics(registry)[0].decode())


def test_an_answer(registry: Registry, metrics: GatewayMetrics) -> None:
    with metrics.track_stream():
        metrics.first_token("demo", 0.2)
        metrics.next_token("demo", 0.003)
        assert value(read(registry), "swarm_gateway_streams_open") == 1
    metrics.tokens_used("demo", prompt=12, completion=2)
    metrics.request_answered("/v1/chat/completions", "demo", 200, 0.25)
    readings = read(registry)
    request = {"endpoint": "/v1/chat/completions", "model": "demo", "status": "200"}
    assert value(readings, "swarm_gateway_requests_total", **request) == 1
    assert value(readings, "swarm_gateway_request_seconds_sum", endpoint="/v1/chat/completions") == 0.25
    assert value(readings, "swarm_gateway_first_token_seconds_sum", model="demo") == 0.2
    assert value(readings, "swarm_gateway_token_seconds_sum", model="demo") == 0.003
    assert value(readings, "swarm_gateway_prompt_tokens_total", model="demo") == 12
    assert value(readings, "swarm_gateway_completion_tokens_total", model="demo") == 2
    assert value(readings, "swarm_gateway_streams_open") == 0


def test_labels_do_not_grow_with_what_users_send(registry: Registry, metrics: GatewayMetrics) -> None:
    metrics.request_answered("/v1/chat/completions", "demo", 200, 0.1)
    metrics.request_answered("/v1/models", None, 200, 0.1)
    before = len(read(registry))
    for number in range(50):
        metrics.request_answered(f"/{number}", f"model {number}", 404, 0.1)
        metrics.first_token(f"model {number}", 0.1)
        metrics.request_refused(f"reason {number}")
    readings = read(registry)
    assert value(readings, "swarm_gateway_requests_total", endpoint="other", model="other", status="404") == 50
    assert value(readings, "swarm_gateway_refused_total", reason="other") == 50
    assert len(readings) - before <= 3 * (14 + 3)


def test_endpoints() -> None:
    for path, label in [
        ("/", "/"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/demo", "/v1/models"),
        ("/v1/models/somebody/demo", "/v1/models"),
        ("/page/chat.js", "/page"),
        ("/monitor/", "/monitor"),
        ("/monitor/api/v1/swarm", "/monitor"),
        ("/v1/chat", "other"),
        ("/v1", "other"),
        ("", "other"),
        ("no path", "other"),
    ]:
        assert endpoint_label(path) == label
