"""Reads request bodies that are bounded in size and time, and in memory for all of them together."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from swarm.gateway.http.disconnect import ClientDisconnected
from swarm.gateway.openai.api_errors import PayloadTooLarge, RequestTimeout, ServiceUnavailable

MAX_CONTENT_LENGTH_DIGITS = 18
"""A longer Content-Length exceeds every limit and is not parsed as a number."""


class BodyMemory:
    """Memory for all bodies that are being read at the same time.

    Args:
        size_bytes: how much there is.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes

    def reserve(self, count: int) -> None:
        """Take this many bytes.

        Raises:
            ServiceUnavailable: not so many are free.
        """
        if count > self._free_bytes:
            raise ServiceUnavailable(
                "the gateway is reading too many large requests at once; try again in a moment",
                code="too_much_at_once",
                retry_after_s=1.0,
            )
        self._free_bytes -= count

    def release(self, count: int) -> None:
        """Give this many bytes back."""
        self._free_bytes += count


async def read_body(request: Request, max_bytes: int, timeout_s: float, memory: BodyMemory) -> bytes:
    """The request's body.

    Raises:
        PayloadTooLarge: the body is larger than `max_bytes`.
        RequestTimeout: the body did not arrive within `timeout_s`.
        ServiceUnavailable: too many other bodies are being read.
        ClientDisconnected: the client disconnected before the body was complete.
    """
    announced = request.headers.get("content-length", "0")
    if len(announced) > MAX_CONTENT_LENGTH_DIGITS or (announced.isdigit() and int(announced) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                memory.reserve(len(part))
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the request did not arrive within {timeout_s:.0f} s") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    finally:
        memory.release(len(body))
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request is larger than {max_bytes} bytes, the limit of this gateway", code="too_large")
