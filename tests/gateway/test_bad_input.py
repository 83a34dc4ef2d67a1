"""Invalid and hostile requests over HTTP to a gateway of a real three-server swarm."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from swarm.gateway import api_keys
from swarm.gateway.api_keys import KeyLimits
from swarm.gateway.settings import GatewaySettings
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import GatewayProcess, metric_at, run_gateway
from tests.waiting import wait_until

LIMIT = 2 * 2**20
TIMEOUT_S = 1.5
SMALL = GatewaySettings(
    max_concurrent_texts=2, max_waiting=1, read_timeout_s=TIMEOUT_S, send_timeout_s=TIMEOUT_S, public_status=True
)
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
ENDLESS = {"max_tokens": 1000, "logit_bias": {"0": -100}}
"""Token 0, the end of a text, is never sampled."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    limits = {
        "free": KeyLimits(),
        "other": KeyLimits(),
        "requests": KeyLimits(requests_per_minute=2),
        "tokens": KeyLimits(tokens_per_minute=60),
        "concurrent": KeyLimits(concurrent=1),
    }
    return path, {name: api_keys.add_key(path, name, limit) for name, limit in limits.items()}


@pytest.fixture(scope="module")
def guarded(swarm, secrets):
    """A gateway with keys, short timeouts and few places."""
    with run_gateway(swarm, settings=SMALL, keys=secrets[0]) as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 4, **fields}


def post(
    gateway: GatewayProcess, body: Any, path: str = "chat/completions", secret: str | None = None
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if secret is not None:
        headers["Authorization"] = f"Bearer {secret}"
    return httpx.post(f"{gateway.api}/{path}", content=content, headers=headers, timeout=60)


def refusal(reply: httpx.Response) -> tuple[int, str, str | None, str | None]:
    """Status, message, param and code, in OpenAI's form."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status_code, error["message"], error["param"], error["code"]


def wait_idle(gateway: GatewayProcess) -> None:
    wait_until(lambda: gateway.metric("swarm_gateway_running") == gateway.metric("swarm_gateway_waiting") == 0)


@contextmanager
def running(gateway: GatewayProcess, secret: str, **more: Any) -> Iterator[None]:
    """A request that runs until the end of the context."""
    body = chat(stream=True, **ENDLESS, **more)
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.stream("POST", f"{gateway.api}/chat/completions", json=body, headers=headers, timeout=60) as reply:
        lines = reply.iter_lines()
        assert any(line.startswith("data: {") for line in lines)
        yield


def connect(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=30)


def request_head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


def read_all(connection: socket.socket) -> bytes:
    """All data until the other side closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_broken_json(gateway):
    for path in ["chat/completions", "completions"]:
        for body, message in [
            (b"{", "the body is not valid JSON: Input data was truncated"),
            (
                b'{"model": "demo" "x": 1}',
                "the body is not valid JSON: JSON is malformed: expected ',' or '}' (byte 17)",
            ),
            (b"\xff\xfe", "the body is not valid JSON: JSON is malformed: invalid character (byte 0)"),
            (b"[" * 100_000, "Expected `object`, got `array`"),
        ]:
            status, said, _, _ = refusal(post(gateway, body, path))
            assert (status, said) == (400, message)


DEEP = b'{"model": "demo", "messages": [], "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_json_that_is_nested_deeply(gateway):
    status, said, _, _ = refusal(post(gateway, DEEP))
    assert status == 400
    assert said


def test_wrong_types_and_ranges(gateway):
    for field, value, message in [
        ("max_tokens", -2, "Expected `int` >= -1, at `max_tokens`"),
        ("messages", ["hi"], "Expected `object`, got `str`, at `messages[0]`"),
        ("logit_bias", {"2048": 1}, "'2048' is not one of the model's 2048 tokens"),
        ("response_format", {"type": "yaml"}, "response_format: Invalid enum value 'yaml' - at `type`"),
    ]:
        status, said, param, _ = refusal(post(gateway, chat(**{field: value})))
        assert (status, said) == (400, message)
        assert param is not None
        assert param.startswith(field)


def test_an_unknown_model(gateway):
    message = "the model 'gpt-9' is not served here; this gateway has demo"
    for path, body in {
        "chat/completions": chat(model="gpt-9"),
        "completions": {"model": "gpt-9", "prompt": "a"},
    }.items():
        assert refusal(post(gateway, body, path)) == (404, message, "model", "model_not_found")
    assert refusal(httpx.get(f"{gateway.api}/models/gpt-9")) == (404, message, "model", "model_not_found")


def test_unknown_addresses_and_methods(gateway):
    assert refusal(httpx.get(f"{gateway.api}/engines"))[:2] == (404, "there is nothing at /v1/engines")
    reply = httpx.get(f"{gateway.api}/chat/completions")
    assert refusal(reply)[:2] == (405, "/v1/chat/completions does not support GET")
    assert reply.headers["allow"] == "POST"


def test_a_host_name_that_others_may_own(gateway, guarded):
    """The page of another site may point its own name at this machine. With keys, that does not help it."""
    message = (
        "this gateway does not accept requests under this name: use its IP address, or start it with --host-name and "
        "the name under which it is reached, or with --keys"
    )
    reply = httpx.post(f"{gateway.api}/chat/completions", json=chat(), headers={"Host": "evil.example:8000"})
    assert refusal(reply) == (403, message, None, "wrong_host")
    assert httpx.get(f"{guarded.url}/healthz", headers={"Host": "chat.example"}).status_code == 200


def test_files_outside_of_the_page_are_not_served(gateway):
    for path in ["/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd"]:
        with connect(gateway) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert read_all(connection).split()[1] == b"404"


def test_a_prompt_of_10_mb_is_not_read(gateway):
    body = chat(messages=[{"role": "user", "content": "a" * (10 * 2**20)}])
    message = f"the request is larger than {LIMIT} bytes, the limit of this gateway"
    assert refusal(post(gateway, body)) == (413, message, None, "too_large")


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"


def test_a_chunked_prompt_of_10_mb_is_not_read(gateway):
    """Its length is not announced. A client that sends all of it before it reads still gets the response."""
    with connect(gateway) as connection:
        connection.sendall(CHUNKED)
        for _ in range(10 * 2**20 // 0x10000):
            connection.sendall(CHUNK)
        connection.sendall(b"0\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "too_large"


def test_a_prompt_that_is_longer_than_the_context(gateway):
    prompt = "word " * 20_000
    tokens = len(load_tokenizer(DEMO_FOLDER)(prompt)["input_ids"])
    message = f"This model's maximum context length is 1024 tokens. The prompt has {tokens} tokens; send a shorter one"
    reply = post(gateway, {"model": "demo", "prompt": prompt}, "completions")
    assert refusal(reply) == (400, message, "prompt", "context_length_exceeded")


def test_keys(guarded, secrets):
    say = "the operator of the gateway creates keys with `swarm keys add`"
    missing = (401, f"a key is required: Authorization: Bearer KEY; {say}", None, "invalid_api_key")
    wrong = (401, f"this gateway does not know the key; {say}", None, "invalid_api_key")
    assert refusal(post(guarded, chat())) == missing
    assert refusal(post(guarded, chat(), secret="sk-swarm-wrong")) == wrong
    assert refusal(httpx.get(f"{guarded.api}/models", headers={"Authorization": "Basic x"})) == wrong
    assert refusal(httpx.get(f"{guarded.api}/models", headers={"x-api-key": "x"})) == wrong
    assert refusal(post(guarded, b"{", secret="x" * 5000)) == wrong  # before anything is read
    assert post(guarded, chat(), secret=secrets[1]["free"]).status_code == 200


def test_requests_of_a_key(guarded, secrets):
    secret = secrets[1]["requests"]
    assert [post(guarded, chat(), secret=secret).status_code for _ in range(2)] == [200, 200]
    reply = post(guarded, chat(), secret=secret)
    seconds = reply.headers["retry-after"]
    assert 1 <= int(seconds) <= 60
    message = f"this key may send 2 requests a minute: try again in {seconds} s"
    assert refusal(reply) == (429, message, None, "rate_limit_exceeded")
    assert reply.json()["error"]["type"] == "rate_limit_error"


def test_tokens_of_a_key(guarded, secrets):
    secret = secrets[1]["tokens"]
    prompt = len(load_tokenizer(DEMO_FOLDER).apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"])
    reply = post(guarded, chat(max_tokens=100), secret=secret)
    message = f"prompt and max_tokens are {prompt + 100} tokens, and this key may use 60 a minute: ask for fewer"
    assert refusal(reply) == (429, message, None, "rate_limit_exceeded")
    used = post(guarded, chat(max_tokens=10, logit_bias={"0": -100}), secret=secret).json()["usage"]["total_tokens"]
    assert used == prompt + 10
    reply = post(guarded, chat(max_tokens=20), secret=secret)
    message = (
        f"this key may use 60 tokens a minute and has {60 - used} left; this request reserves {prompt + 20} "
        f"(prompt and max_tokens): try again in {reply.headers['retry-after']} s, or ask for fewer"
    )
    assert refusal(reply) == (429, message, None, "rate_limit_exceeded")
    assert post(guarded, chat(max_tokens=60 - used - prompt), secret=secret).status_code == 200


def test_requests_of_a_key_at_once(guarded, secrets):
    secret = secrets[1]["concurrent"]
    with running(guarded, secret):
        reply = post(guarded, chat(), secret=secret)
        message = "this key may have 1 requests at once: wait until one has ended"
        assert refusal(reply) == (429, message, None, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "1"
        assert post(guarded, chat(), secret=secrets[1]["free"]).status_code == 200
    wait_idle(guarded)
    assert post(guarded, chat(), secret=secret).status_code == 200


def test_a_full_queue(guarded, secrets):
    free, other = secrets[1]["free"], secrets[1]["other"]
    with ExitStack() as stack:
        for secret in (free, other):
            stack.enter_context(running(guarded, secret))
        waiting = stack.enter_context(connect(guarded))
        body = json.dumps(chat()).encode()
        waiting.sendall(request_head(len(body), f"Authorization: Bearer {free}") + body)
        wait_until(lambda: guarded.metric("swarm_gateway_waiting") == 1)
        reply = post(guarded, chat(), secret=free)
        seconds = reply.headers["retry-after"]
        message = f"the gateway is busy: 2 requests run and 1 wait; try again in {seconds} s"
        assert refusal(reply) == (429, message, None, "rate_limit_exceeded")
        assert httpx.get(f"{guarded.url}/healthz").status_code == 200
        waiting.close()  # a waiting client that disconnects frees its place
        wait_until(lambda: guarded.metric("swarm_gateway_waiting") == 0)
    wait_idle(guarded)


def test_every_answer_of_a_request_counts(guarded, secrets):
    """A server accepts a limited number of sessions from one gateway. Beyond it, the server would be full for all."""
    free, other = secrets[1]["free"], secrets[1]["other"]
    with running(guarded, free, n=2), connect(guarded) as waiting:
        body = json.dumps(chat()).encode()
        waiting.sendall(request_head(len(body), f"Authorization: Bearer {other}") + body)
        wait_until(lambda: guarded.metric("swarm_gateway_waiting") == 1)
        assert guarded.metric("swarm_gateway_running") == 1
    wait_idle(guarded)


def test_a_stream_begins_while_its_request_waits(guarded, secrets):
    """Its client and all proxies know that it is taken. What it cannot be told by a status is an event."""
    free, other = secrets[1]["free"], secrets[1]["other"]
    headers = {"Authorization": f"Bearer {other}"}
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        first.enter_context(running(guarded, free, n=2))
        asked = ("POST", f"{guarded.api}/chat/completions")
        reply = stack.enter_context(httpx.stream(*asked, json=chat(stream=True), headers=headers, timeout=60))
        lines = reply.iter_lines()
        assert (reply.status_code, next(lines)) == (200, ": waiting")
        assert guarded.metric("swarm_gateway_waiting") == 1
        first.close()
        assert "data: [DONE]" in lines
    wait_idle(guarded)


def test_a_slow_reader_is_disconnected(guarded, secrets, swarm):
    """It reads nothing: what is buffered for it is bounded, its sessions are freed, and other requests continue."""
    before = guarded.metric("swarm_gateway_completion_tokens_total")
    body = json.dumps(chat(n=8, stream=True, logprobs=True, top_logprobs=20, **ENDLESS)).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", guarded.port))
        reader.sendall(request_head(len(body), f"Authorization: Bearer {secrets[1]['free']}") + body)
        wait_until(lambda: guarded.metric("swarm_gateway_running") == 1)
        assert post(guarded, chat(), secret=secrets[1]["other"]).status_code == 200
        wait_idle(guarded)
        assert guarded.metric("swarm_gateway_completion_tokens_total") - before < 8 * 1000
    for server in swarm.working():
        wait_until(lambda server=server: metric_at(server.metrics_url, "swarm_server_sessions_open") == 0)


def test_a_slow_sender_of_a_body_is_disconnected(guarded, secrets):
    with connect(guarded) as sender:
        sender.sendall(request_head(100, f"Authorization: Bearer {secrets[1]['free']}") + b'{"model"')
        head, _, body = read_all(sender).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["message"] == "the request did not arrive within 2 s"


@pytest.mark.slow
def test_slow_senders_of_a_head_are_disconnected(gateway):
    begun = (b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    with ExitStack() as stack:
        senders = [stack.enter_context(connect(gateway)) for _ in begun]
        for sender, sent in zip(senders, begun, strict=True):
            sender.sendall(sent)
        second = stack.enter_context(connect(gateway))
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += second.recv(65536)
        second.sendall(b"GET /healthz HTTP/1.1\r\n")  # a second request on the same connection
        assert [read_all(sender) for sender in (*senders, second)] == [b""] * 4


def test_input_that_is_not_http(gateway):
    with connect(gateway) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")  # TLS
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_an_endless_head_is_cut_off(gateway):
    with connect(gateway) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b"x" * (64 * 2**20))


def test_1000_connections_at_once(gateway):
    """Half of them send nothing, half begin a request. Others are served meanwhile."""
    head = request_head(100) + b'{"model"'
    with ExitStack() as stack:
        for number in range(1000):
            connection = stack.enter_context(connect(gateway))
            if number % 2:
                connection.sendall(head)
        reply = post(gateway, chat())
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] >= 1
        assert httpx.get(f"{gateway.url}/healthz").status_code == 200
    wait_idle(gateway)


def test_after_all_of_it_the_gateway_works(gateway, guarded, secrets):
    """The last test of this file."""
    assert post(gateway, chat()).status_code == 200
    assert post(guarded, chat(), secret=secrets[1]["free"]).status_code == 200
    assert gateway.metric("swarm_gateway_running") == guarded.metric("swarm_gateway_running") == 0
