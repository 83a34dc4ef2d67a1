"""Reads request bodies that are bounded in size and time, and in memory for all requests together.

What a request holds is charged from its first byte until it is admitted, in whatever form: bytes that are being read,
decoded objects that wait for a thread, or tokens that wait for their turn. After admission, the number of running
requests is what bounds their memory.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import ClientDisconnect, Request

from swarm.gateway.http.responses import ClientDisconnected
from swarm.gateway.openai.api_errors import (
    BadRequest,
    PayloadTooLarge,
    RequestTimeout,
    ServiceUnavailable,
    UnsupportedMediaType,
)

MAX_CONTENT_LENGTH_DIGITS = 18
"""A longer Content-Length exceeds every limit and is not parsed as a number."""

CHARACTER_BYTES = 4
"""Python keeps a text with one character beyond the basic plane in 4 bytes for each."""

GZIP_WINDOW_BITS = 31
"""zlib's name for gzip with the largest window, which is 32 KiB."""

VALUE_BYTES = 96
"""The most that a value of JSON takes in memory, besides its characters: empty arrays and objects are the worst."""

TOKEN_BYTES = 40
"""What a token id takes in memory: a Python integer, and its place in a list."""


class RequestMemory:
    """Memory for all requests that are not admitted yet. Used by one event loop.

    Args:
        size_bytes: how much there is.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._held: dict[str | None, int] = {}

    @property
    def free_bytes(self) -> int:
        """How much is not held by any request."""
        return self._size_bytes - sum(self._held.values())

    def charge(self, key_name: str | None, count: int) -> None:
        """Take this many bytes for a request of this key. A key gets at most half; requests without a key may use all.

        Raises:
            PayloadTooLarge: this many would never be free.
            ServiceUnavailable: fewer are free now.
        """
        share = self._size_bytes // 2 if key_name is not None else self._size_bytes
        held = self._held.get(key_name, 0)
        if count > min(share - held, self.free_bytes):
            if count > share:
                raise PayloadTooLarge("the request takes too much memory; send a shorter one", code="too_large")
            raise ServiceUnavailable(
                "the gateway is holding too many large requests at once; try again in a moment",
                code="too_much_at_once",
                retry_after_s=1.0,
            )
        self._held[key_name] = held + count

    def release(self, key_name: str | None, count: int) -> None:
        """Give this many bytes back."""
        self._held[key_name] -= count
        if not self._held[key_name]:
            del self._held[key_name]


class RequestRoom:
    """What one request holds of a `RequestMemory`. It is given back when the context ends, or earlier by `release`.

    Args:
        memory: of all requests.
        key_name: the key that the request came with; None on a gateway without keys.
    """

    def __init__(self, memory: RequestMemory, key_name: str | None) -> None:
        self._memory = memory
        self._key_name = key_name
        self._bytes = 0

    def hold(self, count: int) -> None:
        """Take this many more bytes. Raises the same as `RequestMemory.charge`."""
        self._memory.charge(self._key_name, count)
        self._bytes += count

    def release(self) -> None:
        """Give everything back."""
        if self._bytes:
            self._memory.release(self._key_name, self._bytes)
            self._bytes = 0

    def __enter__(self) -> RequestRoom:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def decoded_bytes(body: bytes | bytearray) -> int:
    """The most that a JSON document takes in memory once decoded. Only counts characters; decodes nothing."""
    values = body.count(b",") + body.count(b":") + body.count(b"{") + body.count(b"[")
    return CHARACTER_BYTES * len(body) + VALUE_BYTES * values


async def read_body(request: Request, max_bytes: int, timeout_s: float, room: RequestRoom) -> bytes:
    """Read the request's body. `room` then holds what it takes, both as bytes and decoded.

    Raises:
        BadRequest: the body is not what its Content-Encoding says.
        UnsupportedMediaType: its Content-Encoding is not known here.
        PayloadTooLarge: the body, or what is unpacked from it, is larger than `max_bytes`, or takes more memory than
            one request gets.
        RequestTimeout: the body did not arrive within `timeout_s`.
        ServiceUnavailable: too many other requests hold memory.
        ClientDisconnected: the client disconnected before the body was complete.
    """
    announced = request.headers.get("content-length", "0")
    if len(announced) > MAX_CONTENT_LENGTH_DIGITS or (announced.isdigit() and int(announced) > max_bytes):
        raise _too_large(max_bytes)
    unpacked = _unpacker(request.headers.get("content-encoding", ""), max_bytes)
    received = 0
    body = bytearray()  # no list of parts, which takes many times their bytes if a client sends a few at a time
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                received += len(part)
                if received > max_bytes:
                    raise _too_large(max_bytes)
                part = unpacked.add(part) if unpacked is not None else part
                room.hold(len(part))
                body += part
    except TimeoutError:
        raise RequestTimeout(f"the request did not arrive within {timeout_s:.0f} s") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    if unpacked is not None:
        unpacked.require_complete()
    room.hold(decoded_bytes(body))
    return bytes(body)


class _GzipUnpacker:
    """Unpacks a body that comes in parts, up to a limit.

    Args:
        max_bytes: of what is unpacked.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes
        self._decompressor = zlib.decompressobj(GZIP_WINDOW_BITS)

    def add(self, part: bytes) -> bytes:
        """What the next part unpacks to. Raises `PayloadTooLarge` or `BadRequest`."""
        try:
            unpacked = self._decompressor.decompress(part, self._left + 1)
        except zlib.error:
            raise _not_gzip() from None
        self._left -= len(unpacked)
        if self._left < 0:
            raise _too_large(self._max_bytes)
        if self._decompressor.unused_data:
            raise _not_gzip()
        return unpacked

    def require_complete(self) -> None:
        """Raises `BadRequest` if something is missing."""
        if not self._decompressor.eof:
            raise _not_gzip()


def _unpacker(encoding: str, max_bytes: int) -> _GzipUnpacker | None:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip"):
        return _GzipUnpacker(max_bytes)
    raise UnsupportedMediaType(
        f"the Content-Encoding {encoding[:50]!r} is not known here; send the body as it is, or packed with gzip",
        code="unsupported_encoding",
    )


def _not_gzip() -> BadRequest:
    return BadRequest(
        "the body is not one complete gzip file, as its Content-Encoding says; send it as it is", code="invalid_gzip"
    )


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request is larger than {max_bytes} bytes, the limit of this gateway", code="too_large")
