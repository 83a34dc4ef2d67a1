"""Names that nobody else can own, and pages that may send requests, without a network."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from swarm.gateway.access import HostCheck, check_origin, cors_middleware, is_local_name, is_loopback
from swarm.gateway.openai.api_errors import OriginNotAllowed
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


def test_names_of_this_machine() -> None:
    for host in LOCAL:
        assert is_local_name(host)


def test_names_that_others_may_own() -> None:
    for host in ELSEWHERE:
        assert not is_local_name(host)


async def _answer(request: Request) -> Response:
    return PlainTextResponse("here")


def test_requests() -> None:
    for host, also, status in [
        ("127.0.0.1:8000", (), 200),
        ("evil.example", (), 403),
        ("chat.example", ("chat.example",), 200),
        ("chat.example:8000", ("chat.example",), 200),
        ("Chat.Example", ("chat.example",), 200),
        ("evil.chat.example", ("chat.example",), 403),
        ("0.0.0.0:8000", (), 403),
    ]:
        app = HostCheck(Starlette(routes=[Route("/", _answer)]), also)
        reply = TestClient(app).get("/", headers={"Host": host})
        assert reply.status_code == status
        if status == 403:
            error = reply.json()["error"]
            assert error["code"] == "wrong_host"
            assert ("use http://127.0.0.1" in error["message"]) is host.startswith("0.0.0.0")


def test_loopback_addresses() -> None:
    for host, loopback in [("127.0.0.1", True), ("127.1.2.3", True), ("0.0.0.0", False)]:
        with listen(host, 0) as listening:
            assert is_loopback(listening) is loopback


def test_the_address_that_is_shown_is_one_that_is_answered() -> None:
    for host, reached in [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")]:
        with listen(host, 0) as listening:
            assert url_of(listening) == f"http://{reached}:{listening.getsockname()[1]}/"


OURS = "https://chat.example"


def test_pages_from_elsewhere():
    for site, origin, origins, may in [
        (None, None, (), True),  # no browser
        ("same-origin", "http://127.0.0.1:8000", (), True),
        ("same-origin", "http://else.where", (), False),  # the two contradict each other
        ("none", "http://127.0.0.1:3000", (), False),
        ("same-origin", "https://ours.example", (), True),  # a proxy that puts its own name into Host
        ("cross-site", "https://else.where", (), False),
        ("cross-site", "null", (), False),
        ("same-site", "http://127.0.0.1:3000", (), False),
        ("cross-site", OURS, (OURS,), True),
        ("cross-site", "https://else.where", (OURS,), False),
        ("cross-site", "https://else.where", ("*",), True),
    ]:
        named = {"sec-fetch-site": site, "origin": origin, "host": "127.0.0.1:8000"}
        headers = Headers({name: value for name, value in named.items() if value is not None})
        if may:
            check_origin(headers, origins, ["ours.example"])
        else:
            with pytest.raises(OriginNotAllowed, match="pages of other sites may not use this gateway"):
                check_origin(headers, origins, ["ours.example"])


def test_browsers_that_do_not_say_where_a_request_comes_from():
    """Old ones, and all of them where the gateway is reached over plain HTTP in a local network."""
    for origin, host, origins, may in [
        ("http://192.168.1.5:8000", "192.168.1.5:8000", (), True),
        ("http://192.168.1.5", "192.168.1.5:80", (), True),
        ("https://chat.example", "chat.example", (), True),  # behind a proxy
        ("http://[::1]:8000", "[::1]:8000", (), True),
        ("https://ours.example", "127.0.0.1:8000", (), True),  # a proxy that puts its own name into Host
        ("https://else.where", "192.168.1.5:8000", (), False),
        ("http://192.168.1.5:3000", "192.168.1.5:8000", (), False),  # another program of that machine
        ("https://192.168.1.5.else.where", "192.168.1.5:8000", (), False),
        ("null", "192.168.1.5:8000", (), False),  # a file, or a frame without an origin
        ("null", "192.168.1.5:8000", ("*",), True),
        ("http://[", "192.168.1.5:8000", (), False),
        ("https://else.where", "192.168.1.5:8000", ("https://else.where",), True),
    ]:
        headers = Headers({"origin": origin, "host": host})
        if may:
            check_origin(headers, origins, ["ours.example"])
        else:
            with pytest.raises(OriginNotAllowed):
                check_origin(headers, origins, ["ours.example"])


SDK_HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-os,x-stainless-retry-count,x-title"
"""What OpenAI's SDK sets in a browser, and what OpenRouter's users add."""


def test_a_page_may_set_the_headers_that_it_asks_for():
    for origin, status in [(OURS, 200), ("https://else.where", 400)]:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": SDK_HEADERS,
        }
        client = TestClient(Starlette(middleware=[cors_middleware([OURS])]))
        reply = client.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == status
        if status == 200:
            assert reply.headers["access-control-allow-origin"] == OURS
            assert set(SDK_HEADERS.split(",")) <= set(reply.headers["access-control-allow-headers"].lower().split(","))
