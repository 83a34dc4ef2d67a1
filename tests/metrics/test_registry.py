"""What every process tells of itself."""

from __future__ import annotations

import os
import platform

import psutil

from swarm.common.version import VERSION
from swarm.metrics.client import ClientMetrics
from swarm.metrics.event_loop import EventLoopMetrics
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import Registry, encode_metrics, new_registry
from swarm.metrics.server import ServerMetrics
from tests.metrics.readings import parse, value


def test_a_process_tells_its_version_and_what_it_takes() -> None:
    body, content_type = encode_metrics(new_registry())
    readings = parse(body.decode())
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert value(readings, "swarm_build_info", version=VERSION, python=platform.python_version()) == 1
    resident = psutil.Process(os.getpid()).memory_info().rss
    told = value(readings, "process_resident_memory_bytes")
    assert told is not None
    assert resident / 2 < told < resident * 2


def test_all_instruments_fit_into_one_registry() -> None:
    registry = new_registry()
    for metrics in (EventLoopMetrics, ServerMetrics, ClientMetrics, GatewayMetrics):
        metrics(registry)
    assert b"swarm_server_tokens_total" in encode_metrics(registry)[0]


def test_registries_know_nothing_of_each_other() -> None:
    first, second = Registry(), Registry()
    ServerMetrics(first).session_opened()
    ServerMetrics(second)
    counts = [
        value(parse(encode_metrics(one)[0].decode()), "swarm_server_sessions_opened_total") for one in (first, second)
    ]
    assert counts == [1, 0]


def test_nothing_tells_when_it_was_made() -> None:
    registry = Registry()
    ClientMetrics(registry)
    assert b"_created" not in encode_metrics(registry)[0]
