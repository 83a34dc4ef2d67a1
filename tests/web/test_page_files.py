"""Files of a page, files that pages share, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from swarm.web.http_server import SECURITY_HEADERS, SecurityHeaders
from swarm.web.page_files import SHARED_FOLDER, PageFiles


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    folder = tmp_path / "page"
    (folder / "ui").mkdir(parents=True)
    (folder / "ui" / "dom.js").write_text("own")
    (tmp_path / "secret.py").write_text("secret")
    app = Starlette(routes=[Mount("/page", PageFiles(folder, {"Cache-Control": "no-cache"}))])
    return TestClient(SecurityHeaders(app))


def test_own_and_shared_files(client: TestClient) -> None:
    assert client.get("/page/ui/dom.js").text == "own"
    palette = client.get("/page/palette.css")
    assert palette.content == (SHARED_FOLDER / "palette.css").read_bytes()
    assert palette.headers["content-type"].startswith("text/css")


def test_nothing_else(client: TestClient) -> None:
    for path in ["../secret.py", "%2e%2e/secret.py", "ui/../../secret.py", "ui", "none.js", ""]:
        assert client.get(f"/page/{path}").status_code == 404


def test_headers(client: TestClient) -> None:
    for name in ("ui/dom.js", "palette.css"):
        headers = client.get(f"/page/{name}").headers
        assert headers["cache-control"] == "no-cache"
        assert {header: headers[header] for header in SECURITY_HEADERS} == {
            **SECURITY_HEADERS,
            "Cache-Control": "no-cache",
        }
