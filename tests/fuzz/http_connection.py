"""A client's connection that sends any bytes, and reads what comes back as HTTP."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import h11

READ_BYTES = 1 << 16
EOF_DELAY_S = 0.2
"""A client that ends its side at once counts as one that has left."""

MAX_HEAD_BYTES = 1 << 17


@dataclass(frozen=True)
class Answer:
    """An answer; its status is 0 if the connection ended before it was complete, or if it is no HTTP/1.1."""

    status: int = 0
    body: bytes = b""


class HttpConnection:
    """Reads answers with h11, which is told of a request of its own in place of those that are sent.

    Args:
        place: host and port.
    """

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self._parser = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def send(self, data: bytes, ends: bool = False) -> None:
        """Send bytes, and open the connection first if it is closed.

        Args:
            ends: end this side a moment later.
        """
        if self._writer is None:
            self._parser = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
            self._reader, self._writer = await asyncio.open_connection(*self._place)
        self._writer.write(data)
        if ends:
            self._ending = asyncio.ensure_future(self._end(self._writer))
        else:
            with suppress(ConnectionError):
                await self._writer.drain()

    @staticmethod
    async def _end(writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await writer.drain()
            await asyncio.sleep(EOF_DELAY_S)
            writer.write_eof()

    async def receive(self, method: str = "GET") -> Answer:
        """The next answer.

        Args:
            method: of the request: an answer to HEAD has no body, whatever its head says.
        """
        status, body = 0, bytearray()
        try:
            if self._parser.our_state is h11.DONE:
                self._parser.start_next_cycle()
            self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
            self._parser.send(h11.EndOfMessage())
            while True:
                event = await self._next_event()
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
                elif isinstance(event, h11.ConnectionClosed):
                    raise ConnectionError("no answer")
        except (h11.ProtocolError, ConnectionError):
            await self.close()
            return Answer()
        if self._parser.their_state is not h11.DONE:
            await self.close()
        return Answer(status, bytes(body))

    async def _next_event(self) -> object:
        assert self._reader is not None
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            self._parser.receive_data(await self._reader.read(READ_BYTES))
        return event

    async def close(self) -> None:
        """Reset the connection."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = self._ending = None

    async def __aenter__(self) -> HttpConnection:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
