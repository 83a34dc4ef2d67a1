"""One HTTP connection, of which a client may not make too much by being slow.

uvicorn bounds how long a connection may rest between requests, but neither how long the head of a request may take nor
what the kernel keeps for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Within which the head of a request has to come, the first one's counted from the connection on."""

UNREAD = 1 << 18
"""Bytes that the kernel keeps for a client that does not read; by itself it takes up to 4 MiB."""

UNREAD_SECONDS = 60.0
"""Within which a client has to take what waits for it, whatever it is. Closing alone would wait for it, too."""


class BoundedHttp(H11Protocol):
    """Hangs up on a client that says nothing, does not finish the head of a request, or does not read its answer."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: Any = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answers:
            self._stop_waiting()
        elif self._late is None:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._was_read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._was_read()
        super().connection_lost(exc)

    @property
    def _answers(self) -> bool:
        """Whether a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _hang_up(self) -> None:
        self._late = None
        if not self._answers:
            self.transport.close()
