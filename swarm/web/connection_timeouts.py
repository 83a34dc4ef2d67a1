"""HTTP connections that a slow client cannot keep open for long, and that end quietly if what it sends is no HTTP.

uvicorn limits how long a connection may be idle between requests, but neither how long the head of a request may take
nor how much the kernel buffers for a client that does not read.

`TimeoutHttpProtocol` relies on internals of uvicorn's h11 protocol: `cycle` with `response_complete`, `disconnected`
and `message_event`, `conn`, `loop`, `transport`, `send_400_response`, and asyncio callbacks that can be overridden.
They are not a public interface, so setup.cfg pins uvicorn to the minor version that the tests ran with. Read
`uvicorn/protocols/http/h11_impl.py` before the range is widened.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, h11  # type: ignore[attr-defined]

REQUEST_HEAD_TIMEOUT_S = 10.0
"""Within which the head of a request has to arrive; that of the first one counts from the connection on."""

SEND_BUFFER_BYTES = 1 << 18
"""What the kernel buffers for a client that does not read. Its default is up to 4 MiB."""

UNREAD_TIMEOUT_S = 60.0
"""Within which a client has to read what is waiting for it. Without it, closing the connection would wait, too."""


class TimeoutHttpProtocol(H11Protocol):
    """Closes the connection if a client sends nothing, does not complete a request's head, or does not read."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: Any = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_responding:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. If it is the body of a request that is being answered, there is only one answer:
        uvicorn would send two, and write the error of the second one to the log for each such request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what is computed for it ends, as if the client had gone
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def _is_responding(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(REQUEST_HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._is_responding:
            self.transport.close()
