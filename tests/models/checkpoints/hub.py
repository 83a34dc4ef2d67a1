"""A model hub on this machine: files of one commit, whole or in parts, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "somebody/model"


@dataclass
class LocalHub:
    """What the hub was asked for, and how it behaves.

    Attributes:
        endpoint: its URL.
        mode: "ranges", "whole" (it ignores ranges), "short" (it sends less), "long" (more), "broken" (status 500),
            "redirect" (to a store of files), or "expire" (the first URL in the store of each file works once).
        redirected: files for which it was asked and named the store, in order.
        store_tokens: what the store got as Authorization.
        sent: bytes of each part, with its file.
    """

    endpoint: str = ""
    mode: str = "ranges"
    redirected: list[str] = field(default_factory=list)
    store_tokens: list[str | None] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def run_hub(folder: Path) -> Iterator[LocalHub]:
    """Serve the files of a folder as those of `COMMIT` of `REPOSITORY`."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            prefix = f"/{REPOSITORY}/resolve/{COMMIT}/"
            if hub.mode in ("redirect", "expire") and self.path.startswith(prefix):
                self.redirect(self.path.removeprefix(prefix))
                return
            if self.path.startswith("/store/"):
                prefix = self.path.rpartition("/")[0] + "/"
                hub.store_tokens.append(self.headers["Authorization"])
                if hub.mode == "expire" and prefix == "/store/0/" and any(name in self.path for name, _ in hub.sent):
                    self.answer(403, b"")
                    return
            file = folder / self.path.removeprefix(prefix)
            if hub.mode == "broken" or not self.path.startswith(prefix) or not file.is_file():
                self.answer(500 if hub.mode == "broken" else 404, b"")
                return
            data = file.read_bytes()
            if hub.mode == "whole":
                self.answer(200, data)
                return
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1]
            part = {"short": part[:-1], "long": part + b"x"}.get(hub.mode, part)
            hub.sent.append((file.name, len(part)))
            self.answer(206, part)

        def redirect(self, file: str) -> None:
            place = f"http://localhost:{server.server_port}/store/{hub.redirected.count(file)}/{file}"
            hub.redirected.append(file)
            self.send_response(302)
            self.send_header("Location", place)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
