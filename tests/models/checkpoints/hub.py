"""A model hub on this machine: parts of the files of one commit, over HTTP."""

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
    """Its URL, and the name and size of each part that it has sent."""

    endpoint: str = ""
    sent: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def run_hub(folder: Path) -> Iterator[LocalHub]:
    """Serve parts of the files of a folder as those of `COMMIT` of `REPOSITORY`."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = folder / self.path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = file.read_bytes()[int(first) : int(last) + 1]
            hub.sent.append((file.name, len(part)))
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

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
