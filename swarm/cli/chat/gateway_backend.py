"""Generates the answers of a conversation over a gateway's HTTP interface.

The standard library's HTTP client is enough: there is one request at a time.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

from swarm.cli.chat.conversation import (
    AnswerOptions,
    ChatFailed,
    ConversationMessage,
    OnPiece,
    read_chunk,
    read_detail,
    strip_controls,
)
from swarm.errors import InvalidOption

GATEWAY_TIMEOUT_S = 180.0
"""How long nothing may arrive from the gateway. Longer than it waits for missing blocks."""

MAX_LINE_BYTES = 1 << 20
"""Of a line of a stream."""

MAX_BODY_BYTES = 1 << 20
"""Of any other response."""


class GatewayBackend:
    """A model that a gateway serves.

    Args:
        url: with or without `/v1`.
        key: None if the gateway has no keys.
        model: None takes the gateway's first one.

    Raises:
        InvalidOption: the URL or the key is not valid, or the gateway does not have the model.
        ChatFailed: the gateway cannot be reached, or does not list its models.
    """

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._url = base_url(url)
        self._headers = {"Content-Type": "application/json", "X-Swarm-Details": "1"}
        if key is not None:
            if not (key.isascii() and key.isprintable()):
                raise InvalidOption(
                    "SWARM_API_KEY has characters that keys never have: check that you copied the key and nothing else"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        # A redirect is an error, because it could send the key to another server.
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.model = self._choose_model(model)

    def answer(self, messages: Sequence[ConversationMessage], options: AnswerOptions, on_piece: OnPiece) -> None:
        """See `ChatBackend`. If the answer is interrupted, closing the connection ends it at the gateway."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "early_exit": None if options.early_exit is None else {"threshold": options.early_exit},
        }
        fields = {name: value for name, value in body.items() if value is not None}
        with self._open("chat/completions", json.dumps(fields).encode()) as reply:
            try:
                for name, data in read_events(reply):
                    if name is None and data == "[DONE]":
                        return
                    piece = (read_detail if name == "swarm" else read_chunk)(_parse_json(data))
                    if piece is not None:
                        on_piece(piece)
            except (OSError, http.client.HTTPException) as error:
                raise ChatFailed(f"the connection to the gateway broke: {error or type(error).__name__}") from None
        raise ChatFailed("the gateway ended its answer early")

    def close(self) -> None:
        """Does nothing: no connection stays open between answers."""

    def _choose_model(self, model: str | None) -> str:
        with self._open("models") as reply:
            try:
                listed = _parse_json(reply.read(MAX_BODY_BYTES).decode())["data"]
                names = [str(model_object["id"]) for model_object in listed]
            except (OSError, http.client.HTTPException, UnicodeDecodeError, LookupError, TypeError):
                raise ChatFailed(
                    f"{self._url}/models does not list models: check that this is a gateway's URL"
                ) from None
        if not names or (model is not None and model not in names):
            shown = strip_controls(", ".join(names))[:500] or "none"
            raise InvalidOption(f"the gateway does not serve {model or 'any model'}; it has: {shown}")
        return model if model is not None else names[0]

    def _open(self, path: str, body: bytes | None = None) -> IO[bytes]:
        request = urllib.request.Request(f"{self._url}/{path}", body, self._headers)
        try:
            reply: IO[bytes] = self._opener.open(request, timeout=GATEWAY_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatFailed(
                    describe_refusal(error.code, error.headers.get("Retry-After"), _error_body(error))
                ) from None
        except ssl.SSLError as error:
            raise ChatFailed(f"the TLS connection to {self._url} failed: {error}") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last, of a host's name
            why = getattr(error, "reason", None) or error
            raise ChatFailed(f"the gateway at {self._url} cannot be reached: {why}") from None
        return reply


def base_url(url: str) -> str:
    """The URL up to and including `/v1`.

    Raises:
        InvalidOption: the URL is not valid.
    """
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and parts.path.isascii()
    except ValueError:  # an invalid port or IPv6 address
        usable = False
    if not usable:
        raise InvalidOption(f"--url {url!r}: use a gateway's URL, such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def read_events(lines: IO[bytes]) -> Iterator[tuple[str | None, str]]:
    """Name and data of each server-sent event.

    Raises:
        ChatFailed: a line or an event is too long, or is not valid UTF-8.
    """
    name: str | None = None
    data: list[str] = []
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise ChatFailed("the gateway sent a line that is too long")
        try:
            line = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ChatFailed("the gateway sent invalid UTF-8") from None
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = None, []
        field, _, value = line.partition(":")
        if field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))
            if sum(map(len, data)) > MAX_LINE_BYTES:
                raise ChatFailed("the gateway sent an event that is too long")


def describe_refusal(status: int, retry_after: str | None, body: bytes) -> str:
    """The message for a response with an error status."""
    try:
        message = strip_controls(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        message = f"the gateway answered with status {status}"
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6:
        message += f" (try again in {retry_after} s)"
    return message


def _parse_json(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ChatFailed("the gateway sent invalid JSON") from None


def _error_body(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(MAX_BODY_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors."""

    def redirect_request(self, *arguments: Any) -> None:
        return None
