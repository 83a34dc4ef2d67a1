"""The client's side of a request, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request

from swarm.gateway.http.request_body import RequestMemory, RequestRoom, read_body


class Client:
    """The client of one request: what it sends, and what it has received."""

    def __init__(
        self, parts: Iterable[bytes] = (), leaves: bool = False, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._parts = list(parts)
        self._leaves = leaves
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
        }
        self.left = asyncio.Event()
        self.got: list[dict[str, Any]] = []
        self.takes = 1000

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            body = self._parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts) or self._leaves}
        if not self._leaves:
            await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.got) == self.takes:
            await asyncio.Event().wait()
        self.got.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)

    async def read(self, limit: int = 10, seconds: float = 5.0, room: RequestRoom | None = None) -> bytes:
        room = room or RequestRoom(RequestMemory(100), None)
        return await read_body(Request(self.scope, self.receive), limit, seconds, room)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]
