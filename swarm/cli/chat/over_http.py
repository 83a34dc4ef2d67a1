"""Talking to a model over a gateway's HTTP. The standard library's client is enough: one request at a time."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

from swarm.cli.chat.conversation import Hears, Message, Wishes
from swarm.cli.chat.reply_stream import ChatFailed, inert, read_chunk, read_detail
from swarm.errors import InvalidOption

PATIENCE = 180.0
"""Seconds without a byte, after which a gateway is given up. Longer than it waits for missing blocks."""

MAX_LINE = 1 << 20
MAX_BODY = 1 << 20
"""Bytes of a line of a stream, and of any other reply, that are read."""


class GatewayTalk:
    """A model of a gateway.

    Args:
        url: with or without `/v1`.
        key: None if the gateway asks for none.
        model: None takes the gateway's first.

    Raises:
        InvalidOption: the URL is none, or the gateway does not have the model.
        ChatFailed: the gateway does not answer, or not as one.
    """

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._url = base_url(url)
        self._headers = {"Content-Type": "application/json", "X-Swarm-Details": "1"}
        if key is not None:
            if not (key.isascii() and key.isprintable()):
                raise InvalidOption("--key holds characters that no key has; was it copied whole, and nothing else?")
            self._headers["Authorization"] = f"Bearer {key}"
        # A redirect could take the key elsewhere: it is an error instead.
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.model = self._chosen(model)

    def answer(self, messages: Sequence[Message], wishes: Wishes, hear: Hears) -> None:
        """See `Talk`. Leaving the connection is how a gateway is told that nobody listens."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "messages": [{"role": one.role, "content": one.content} for one in messages],
            "temperature": wishes.temperature,
            "max_tokens": wishes.max_tokens,
            "seed": wishes.seed,
        }
        given = {name: value for name, value in body.items() if value is not None}
        with self._open("chat/completions", json.dumps(given).encode()) as reply:
            try:
                for name, data in events(reply):
                    if name is None and data == "[DONE]":
                        return
                    piece = (read_detail if name == "swarm" else read_chunk)(_parsed(data))
                    if piece is not None:
                        hear(piece)
            except (OSError, http.client.HTTPException) as error:
                raise ChatFailed(f"the connection to the gateway broke: {error or type(error).__name__}") from None
        raise ChatFailed("the gateway broke off its answer")

    def close(self) -> None:
        """Nothing is open between answers."""

    def _chosen(self, model: str | None) -> str:
        with self._open("models") as reply:
            try:
                listed = _parsed(reply.read(MAX_BODY).decode())["data"]
                names = [str(one["id"]) for one in listed]
            except (OSError, http.client.HTTPException, UnicodeDecodeError, LookupError, TypeError):
                raise ChatFailed(f"{self._url}/models does not list models; is this a gateway's URL?") from None
        if not names or (model is not None and model not in names):
            shown = inert(", ".join(names))[:500] or "none"
            raise InvalidOption(f"the gateway does not serve {model or 'any model'}; it has: {shown}")
        return model if model is not None else names[0]

    def _open(self, path: str, body: bytes | None = None) -> IO[bytes]:
        request = urllib.request.Request(f"{self._url}/{path}", body, self._headers)
        try:
            reply: IO[bytes] = self._opener.open(request, timeout=PATIENCE)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatFailed(refusal(error.code, error.headers.get("Retry-After"), _some(error))) from None
        except ssl.SSLError as error:
            raise ChatFailed(f"{self._url} cannot be trusted: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise ChatFailed(f"the gateway at {self._url} cannot be reached: {why}") from None
        return reply


def base_url(url: str) -> str:
    """The URL up to and with `/v1`. Raises `InvalidOption`."""
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        usable = False
    if not usable:
        raise InvalidOption(f"--url {url!r}: use a gateway's URL, such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def events(lines: IO[bytes]) -> Iterator[tuple[str | None, str]]:
    """Name and data of each server-sent event. Raises `ChatFailed` for lines without end, or that are no text."""
    name: str | None = None
    data: list[str] = []
    while raw := lines.readline(MAX_LINE + 1):
        if len(raw) > MAX_LINE:
            raise ChatFailed("the gateway sent a line that is too long")
        try:
            line = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ChatFailed("the gateway sent what is no text") from None
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = None, []
        field, _, value = line.partition(":")
        if field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))
            if sum(map(len, data)) > MAX_LINE:
                raise ChatFailed("the gateway sent an event that is too long")


def refusal(status: int, retry_after: str | None, body: bytes) -> str:
    """What a person is told about an answer with an error status."""
    try:
        message = inert(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        message = f"the gateway answered with status {status}"
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6:
        message += f" (try again in {retry_after} s)"
    return message


def _parsed(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ChatFailed("the gateway sent what is no JSON") from None


def _some(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(MAX_BODY)
    except (OSError, http.client.HTTPException):
        return b""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None
