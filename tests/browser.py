"""Headless Chromium for tests of the pages, driven by Playwright."""

from __future__ import annotations

import json
import mimetypes
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from swarm.web.http_server import SECURITY_HEADERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "swarm" / "gateway" / "page"
PALETTE = ROOT / "swarm" / "web" / "page" / "palette.css"
PICTURES = ROOT / "artifacts"
"""Where tests leave what they saw."""

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000
"""Milliseconds that a page gets for anything before the test fails."""

HOST = "http://swarm.test"
"""Where `serve_files` shows the chat page; no such machine exists."""


def chromium() -> str:
    """The browser's program. Raises `RuntimeError` if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError("the tests of the pages need Chromium: `.ci/install-programs`, or your package manager")
    return found


@contextmanager
def run_browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    expect.set_options(timeout=PATIENCE)
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page of a new visitor, whose storage is empty. An error that nothing caught fails the test.

    Args:
        options: of Playwright's `new_context`.
    """
    with browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}) as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        uncaught: list[str] = []
        context.on("weberror", lambda found: uncaught.append(str(found.error)))
        # What the content security policy forbids is tried by nothing that is meant to be there.
        page.on("console", lambda said: uncaught.append(said.text) if "Content Security Policy" in said.text else None)
        yield page
        assert not uncaught, uncaught


def serve_files(context: BrowserContext, models: list[dict[str, Any]] | None = None) -> None:
    """Answer for `HOST` with the page's files and a list of models, without any gateway.

    Args:
        models: of `/v1/models`; one that chats, if not given.
    """
    listed = models or [{"id": "scripted", "object": "model", "swarm": {"chat_template": True}}]

    def answer(route: Route) -> None:
        path = re.sub(r"[?#].*", "", route.request.url.removeprefix(HOST))
        if path == "/v1/models":
            route.fulfill(body=json.dumps({"object": "list", "data": listed}), content_type="application/json")
            return
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        file = PALETTE if name == PALETTE.name else PAGE / name
        if not (path == "/" or path.startswith("/page/")) or not file.is_file():
            route.fulfill(status=404, body="{}", content_type="application/json")
            return
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        route.fulfill(body=file.read_bytes(), content_type=kind, headers={**SECURITY_HEADERS, "Content-Type": kind})

    context.route(f"{HOST}/**", answer)


def stream(*parts: str, whole: bool = True) -> dict[str, Any]:
    """What a gateway replies that says these words."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]} for part in parts]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return {"body": body + ("data: [DONE]\n\n" if whole else ""), "content_type": "text/event-stream"}


def failure(status: int, message: str, **headers: str) -> dict[str, Any]:
    return {"status": status, "json": {"error": {"message": message, "type": "x"}}, "headers": headers}


class Answers:
    """Gives one reply after the other, the last one for ever, and remembers the requests."""

    def __init__(self, page: Page, *replies: dict[str, Any] | None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._replies = list(replies)
        page.route(re.compile(rf"{HOST}/v1/(chat/)?completions"), self._answer)

    def _answer(self, route: Route) -> None:
        self.bodies.append(route.request.post_data_json)
        self.headers.append(route.request.headers)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if reply is None:
            route.abort("connectionrefused")
        else:
            route.fulfill(**reply)


def picture(page: Page, name: str) -> None:
    """Leave a picture of the page for people to look at."""
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


__all__ = [
    "HOST",
    "PICTURES",
    "Answers",
    "chromium",
    "failure",
    "open_page",
    "picture",
    "run_browser",
    "serve_files",
    "stream",
]
