"""Names that nobody else can own, and requests for other names."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from swarm.gateway.access.host_check import HostCheck, is_local_name, is_loopback
from swarm.web.http_server import listen, url_of

LOCAL = ["", "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5:80"]
LOCAL += ["127.0.0.1.", "gateway:8000", "box.local", "host.docker.internal:8000", "chat.localhost:8000"]
ELSEWHERE = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "evil.example.",
]
ELSEWHERE += ["0.0.0.0", "0.0.0.0:8000", "[::]:8000", "0:8000", "0.0.0.0."]
ELSEWHERE += ["local.evil.example", "notlocal.example", "256.0.0.1", "1.2", "["]


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine(host: str) -> None:
    assert is_local_name(host)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_names_that_others_may_own(host: str) -> None:
    assert not is_local_name(host)


async def _answer(request: Request) -> Response:
    return PlainTextResponse("here")


@pytest.mark.parametrize(
    ("host", "also", "status"),
    [
        ("127.0.0.1:8000", (), 200),
        ("evil.example", (), 403),
        ("chat.example", ("chat.example",), 200),
        ("chat.example:8000", ("chat.example",), 200),
        ("192.168.1.5:8000", (), 200),
        ("gateway:8000", (), 200),
        ("Chat.Example", ("chat.example",), 200),
        ("evil.chat.example", ("chat.example",), 403),
        ("evil.example", ("*",), 403),
        ("0.0.0.0:8000", (), 403),
    ],
)
def test_requests(host: str, also: tuple[str, ...], status: int) -> None:
    app = HostCheck(Starlette(routes=[Route("/", _answer)]), also)
    reply = TestClient(app).get("/", headers={"Host": host})
    assert reply.status_code == status
    if status == 403:
        error = reply.json()["error"]
        assert error["code"] == "wrong_host"
        assert ("use http://127.0.0.1" in error["message"]) is host.startswith("0.0.0.0")


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("127.1.2.3", True), ("0.0.0.0", False)])
def test_loopback_addresses(host: str, loopback: bool) -> None:
    with listen(host, 0) as listening:
        assert is_loopback(listening) is loopback


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_address_that_is_shown_is_one_that_is_answered(host: str, reached: str) -> None:
    with listen(host, 0) as listening:
        assert url_of(listening) == f"http://{reached}:{listening.getsockname()[1]}/"
