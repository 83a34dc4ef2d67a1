from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from swarm.monitor import http_routes
from swarm.monitor.swarm_view import VIEW_VERSION
from tests.infos import server_info
from tests.monitor.serving import Monitor, serve
from tests.monitor.sources import DescribedSwarm, found
from tests.waiting import wait_until


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with serve(DescribedSwarm(found(4, server_info(0, 4, "one")))) as monitor:
        yield monitor


def test_the_swarm_as_json(monitor: Monitor) -> None:
    reply = httpx.get(f"{monitor.url}api/v1/swarm")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert reply.headers["cache-control"] == "no-store"
    content = reply.json()
    assert content["version"] == VIEW_VERSION
    assert content["models"][0]["name"] == "org/model"
    assert [block["servers"] for block in content["models"][0]["coverage"]] == [1, 1, 1, 1]
    assert httpx.post(f"{monitor.url}api/v1/swarm").status_code == 405


def test_the_history_as_json(monitor: Monitor) -> None:
    httpx.get(f"{monitor.url}api/v1/swarm")
    wait_until(lambda: monitor.poller.history.models)
    content = httpx.get(f"{monitor.url}api/v1/history?hours=1&model=org/model").json()
    track = content["models"]["org/model"]
    assert (content["version"], content["seconds_per_point"], track["blocks"]) == (1, 60.0, 4)
    assert len(track["time"]) == len(track["servers"]) == len(track["throughput"]) == len(track["covered"]) >= 1
    assert (track["servers"][0], track["throughput"][0], track["covered"][0]) == (1, 0.25, 4)
    assert httpx.get(f"{monitor.url}api/v1/history?model=org/other").json()["models"] == {}


def test_the_page_and_its_files_load_nothing_from_elsewhere(monitor: Monitor) -> None:
    page = httpx.get(monitor.url)
    assert page.headers["content-type"].startswith("text/html")
    for name in ("", *(f"page/{path.name}" for path in http_routes.PAGE.iterdir())):
        reply = httpx.get(f"{monitor.url}{name}")
        assert reply.status_code == 200, name
        assert reply.headers["content-security-policy"].startswith("default-src 'self'"), name
        assert reply.headers["x-content-type-options"] == "nosniff", name
        assert "://" not in reply.text.replace("http://www.w3.org/", ""), name
        assert 'src="/' not in reply.text, name
        assert 'href="/' not in reply.text, name
    for name in ("page/../http_routes.py", "page/%2e%2e/http_routes.py", "page/none.js", "page/"):
        assert httpx.get(f"{monitor.url}{name}").status_code == 404, name
