"""Responses of a gateway as bytes: valid, hostile, and errors."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli.chat.conversation import AnswerOptions, ChatFailed, ConversationMessage, TextPiece
from swarm.cli.chat.gateway_backend import MAX_LINE_BYTES, GatewayBackend, base_url, describe_refusal, read_events
from swarm.errors import InvalidOption

MODELS = json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode()
ASK = (ConversationMessage("user", "hi"),)


@contextmanager
def gateway(models: bytes, stream: bytes = b"", status: int = 200, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every GET and every POST with these bytes: its URL, and the keys that it received."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, stream)

        def _send(self, status: int, body: bytes) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", keys
        finally:
            server.shutdown()
            thread.join()


def heard(url: str) -> list[object]:
    pieces: list[object] = []
    GatewayBackend(url, "sk-swarm-x", None).answer(ASK, AnswerOptions(), pieces.append)
    return pieces


def test_an_answer():
    stream = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n: comment\n\ndata: [DONE]\n\n'
    with gateway(MODELS, stream) as (url, keys):
        assert heard(url) == [TextPiece("Hi")]
        assert keys == ["Bearer sk-swarm-x"] * 2


def test_invalid_answers():
    for stream, message in [
        (b"", "ended its answer early"),
        (b'data: {"choices": []}\n\n', "ended its answer early"),
        (b"data: {\n\n", "invalid JSON"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "invalid JSON"),
        (b"data: \xff\n\n", "invalid UTF-8"),
        (b"data: " + b"x" * (MAX_LINE_BYTES + 10), "too long"),
        (b"data: x" * 10 + b"\n" + (b"data: " + b"x" * 1000 + b"\n") * 1100, "too long"),
        (b'data: {"error": {"message": "the swarm failed"}}\n\n', "the swarm failed"),
    ]:
        with gateway(MODELS, stream) as (url, _), pytest.raises(ChatFailed, match=message):
            heard(url)


def test_responses_of_something_that_is_not_a_gateway():
    for models in [b"", b"[]", b"{}", b'{"data": 7}', b"\xff", b'{"data": [{}]}', b"[" * 100_000]:
        with gateway(models) as (url, _), pytest.raises(ChatFailed):
            GatewayBackend(url, None, None)


def test_models():
    with gateway(MODELS) as (url, _):
        assert GatewayBackend(url, None, None).model == "one"
        assert GatewayBackend(url, None, "two").model == "two"
        with pytest.raises(InvalidOption, match="does not serve three; it has: one, two"):
            GatewayBackend(url, None, "three")


def test_a_redirect_does_not_take_the_key_elsewhere():
    with gateway(MODELS) as (elsewhere, keys), gateway(MODELS, b"", 307, Location=elsewhere) as (url, _):
        with pytest.raises(ChatFailed, match="status 307"):
            heard(url)
        assert keys == []


def test_refusals():
    body = json.dumps({"error": {"message": "the queue is full\x1b[2J"}}).encode()
    with gateway(MODELS, body, 429, Retry_After="7") as (url, _):
        with pytest.raises(ChatFailed, match=r"^the queue is full\[2J \(try again in 7 s\)$"):
            heard(url)
    assert describe_refusal(502, None, b"<html>") == "the gateway answered with status 502"
    assert describe_refusal(502, "tomorrow", b"[" * 100_000) == "the gateway answered with status 502"


def test_a_gateway_that_cannot_be_reached():
    with pytest.raises(ChatFailed, match=r"the gateway at http://127\.0\.0\.1:1/v1 cannot be reached: .*refused"):
        GatewayBackend("http://127.0.0.1:1", None, None)


def test_invalid_urls():
    for url in ["", "gateway", "file:///etc/passwd", "ftp://host/v1", "http://", "http://[", "http://h:x"]:
        with pytest.raises(InvalidOption, match="such as http"):
            base_url(url)


def test_urls():
    assert base_url("http://host:8000") == "http://host:8000/v1"
    assert base_url("https://host/swarm/v1/") == "https://host/swarm/v1"


@given(st.binary(max_size=200))
def test_events_of_any_bytes(data):
    with suppress(ChatFailed):
        assert all(isinstance(text, str) for _, text in read_events(io.BytesIO(data)))


def test_invalid_keys():
    for key in ["sk-swarm-x\nHost: elsewhere", "schlüssel", "x\0"]:
        with pytest.raises(InvalidOption, match="SWARM_API_KEY has characters"):
            GatewayBackend("http://127.0.0.1:9", key, None)


def test_a_list_of_models_that_breaks_off():
    with gateway(MODELS, Transfer_Encoding="chunked") as (url, _), pytest.raises(ChatFailed, match="does not list"):
        GatewayBackend(url, None, None)
