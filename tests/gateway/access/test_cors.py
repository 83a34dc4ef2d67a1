"""Which pages may send requests, without a network."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from swarm.gateway.access.cors import check_origin, cors_middleware
from swarm.gateway.openai.api_errors import OriginNotAllowed

OURS = "https://chat.example"


@pytest.mark.parametrize(
    ("site", "origin", "origins", "may"),
    [
        (None, None, (), True),  # no browser
        ("same-origin", "http://127.0.0.1:8000", (), True),
        ("same-origin", "http://else.where", (), False),  # the two contradict each other
        ("none", "http://127.0.0.1:3000", (), False),
        ("same-origin", "https://ours.example", (), True),  # a proxy that puts its own name into Host
        ("none", None, (), True),
        ("cross-site", "https://else.where", (), False),
        ("cross-site", "null", (), False),
        ("cross-site", None, (), False),
        ("same-site", "http://127.0.0.1:3000", (), False),
        ("cross-site", OURS, (OURS,), True),
        ("cross-site", "https://else.where", (OURS,), False),
        ("cross-site", "https://else.where", ("*",), True),
    ],
)
def test_pages_from_elsewhere(site, origin, origins, may):
    named = {"sec-fetch-site": site, "origin": origin, "host": "127.0.0.1:8000"}
    headers = Headers({name: value for name, value in named.items() if value is not None})
    if may:
        check_origin(headers, origins, ["ours.example"])
    else:
        with pytest.raises(OriginNotAllowed, match="pages of other sites may not use this gateway"):
            check_origin(headers, origins, ["ours.example"])


@pytest.mark.parametrize(
    ("origin", "host", "origins", "may"),
    [
        ("http://192.168.1.5:8000", "192.168.1.5:8000", (), True),
        ("http://192.168.1.5", "192.168.1.5:80", (), True),
        ("https://chat.example", "chat.example", (), True),  # behind a proxy
        ("https://chat.example", "chat.example:443", (), True),
        ("http://[::1]:8000", "[::1]:8000", (), True),
        ("https://ours.example", "127.0.0.1:8000", (), True),  # a proxy that puts its own name into Host
        ("https://else.where", "192.168.1.5:8000", (), False),
        ("http://192.168.1.5:3000", "192.168.1.5:8000", (), False),  # another program of that machine
        ("http://192.168.1.5", "192.168.1.5:8000", (), False),
        ("https://192.168.1.5.else.where", "192.168.1.5:8000", (), False),
        ("null", "192.168.1.5:8000", (), False),  # a file, or a frame without an origin
        ("null", "192.168.1.5:8000", ("*",), True),
        ("", "192.168.1.5:8000", (), False),
        ("http://[", "192.168.1.5:8000", (), False),
        ("https://else.where", "192.168.1.5:8000", ("https://else.where",), True),
    ],
)
def test_browsers_that_do_not_say_where_a_request_comes_from(origin, host, origins, may):
    """Old ones, and all of them where the gateway is reached over plain HTTP in a local network."""
    headers = Headers({"origin": origin, "host": host})
    if may:
        check_origin(headers, origins, ["ours.example"])
    else:
        with pytest.raises(OriginNotAllowed):
            check_origin(headers, origins, ["ours.example"])


SDK_HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-os,x-stainless-retry-count,x-title"
"""What OpenAI's SDK sets in a browser, and what OpenRouter's users add."""


@pytest.mark.parametrize(("origin", "status"), [(OURS, 200), ("https://else.where", 400)])
def test_a_page_may_set_the_headers_that_it_asks_for(origin, status):
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
