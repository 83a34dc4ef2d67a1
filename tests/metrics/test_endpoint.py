"""`/metrics` over HTTP: for Prometheus, and for those who mean no good."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from swarm.errors import AddressUnavailable, InvalidOption
from swarm.metrics import endpoint
from swarm.metrics.endpoint import MetricsAddress, MetricsEndpoint
from swarm.metrics.registry import Registry
from swarm.metrics.server import ServerObserver
from tests.metrics.readings import parse, value

PATIENCE = 60.0
FREE = MetricsAddress("127.0.0.1", 0)


@pytest.fixture
def served() -> Iterator[MetricsEndpoint]:
    registry = Registry()
    ServerObserver(registry).session_opened()
    one = MetricsEndpoint(registry, FREE)
    yield one
    one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "swarm-metrics"]


def connect(one: MetricsEndpoint) -> socket.socket:
    return socket.create_connection((one.address.host, one.address.port), PATIENCE)


def ask(one: MetricsEndpoint, path: str = "/metrics") -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://{one.address}{path}", timeout=PATIENCE) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_prometheus_reads_it(served: MetricsEndpoint) -> None:
    for path in ["/metrics", "/metrics?name[]=swarm_server_sessions_opened_total"]:
        status, body = ask(served, path)
        assert status == 200
        assert value(parse(body), "swarm_server_sessions_opened_total") == 1
        assert served.url == f"http://127.0.0.1:{served.address.port}/metrics"


def test_bad_requests_have_an_answer(served: MetricsEndpoint) -> None:
    for sent, status in [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"\x00\xff garbage\r\n\r\n", b"400"),
    ]:
        with connect(served) as client:
            client.sendall(sent)
            assert status in client.recv(1000).partition(b"\r\n")[0]
        assert ask(served)[0] == 200


def test_silent_connections_are_ended_and_no_more_than_some_are_kept(
    served: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint._QuietRequestHandler, "timeout", 1.0)
    silent = [connect(served) for _ in range(endpoint.MAX_CONNECTIONS)]
    with connect(served) as one_too_many:
        assert one_too_many.recv(1) == b""
    for client in silent:
        assert client.recv(1) == b""
        client.close()
    until_answered(served)
    assert capfd.readouterr().err == ""


def until_answered(one: MetricsEndpoint) -> None:
    """The threads of connections that were ended need a moment to give their room back."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            assert ask(one)[0] == 200
            return
        except (ConnectionError, urllib.error.URLError):
            time.sleep(0.01)
    raise AssertionError("nobody answers any more")


def test_a_port_that_is_taken(served: MetricsEndpoint) -> None:
    with pytest.raises(
        AddressUnavailable, match=rf"cannot listen on {served.address}: another program is listening there"
    ):
        MetricsEndpoint(Registry(), served.address)


def test_addresses() -> None:
    for text, host, port in [
        ("9100", "127.0.0.1", 9100),
        ("0", "127.0.0.1", 0),
        ("0.0.0.0:9100", "0.0.0.0", 9100),
        ("localhost:9100", "127.0.0.1", 9100),
        ("[::1]:9100", "::1", 9100),
    ]:
        assert MetricsAddress.parse(text) == MetricsAddress(host, port)


def test_bad_addresses() -> None:
    for text in [
        "",
        "x",
        "-1",
        "65536",
        "1.2.3.4",
        ":9100",
        "example.org:9100",
        "1.2.3.4:",
        "::1:x",
        "1.2.3.4:９１００",
    ]:
        with pytest.raises(InvalidOption, match=r"--metrics .*: use PORT .* or an IP address and a port"):
            MetricsAddress.parse(text)
