"""HTTP requests of a hostile client. Everything follows from the `random` that is handed in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NEW_TOKENS = 3
"""Of requests that turn out to be valid: others want to be served, too."""

LIMIT_BYTES = 2 << 20
"""Of a body, as gateways have it by default."""

_PATHS = r"""
    /v1/models /v1/models/demo /v1/models/nobody /v1/models/%00%ff%2e%2e/.. /healthz /readyz /metrics / /page/app.js
    /page/../../../etc/passwd /page/%2e%2e/%2e%2e/app.py /page/%00 /page /page/ //else.where/ /page//etc/passwd
    /nothing?%ff&&=# * http://else.where/v1/models /v1/chat/completions /v1/completions /v1/completions/ /% /\
    /v1/responses/resp_x /v1/responses/%00 /api/tags /api/show /v1/messages
"""
PATHS = [*_PATHS.split(), "/v1/models/" + "a" * 5000, "/page/" + "a/" * 500]
METHODS = ("GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "A" * 200)
_HOSTS = "127.0.0.1 localhost:1 evil.example [::1] [zz] [ ] a@b .. \xe4"
HOSTS = ["a b", "", "x" * 900, *_HOSTS.split()]
ORIGINS = ("null", "http://else.where", "http://127.0.0.1", "http://[", "://", "file://", "http://127.0.0.1:99999999")
RANGES = (
    "bytes=0-",
    "bytes=-1",
    "bytes=9-1",
    "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 4000, 2)),
    "x",
    "bytes=,,",
)
LENGTHS = ("0", "1", "-1", "+5", "5, 5", "5, 6", "0x5", "9" * 18, "9" * 400, "1e3", "\xb2", "")
ENCODINGS = ("chunked", "gzip", "gzip, chunked", "chunked, gzip", "identity", "xchunked", " chunked", "chunked\x0b")
CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"f" * 20 + b"\r\n",
    b"f" * 21 + b"\r\n",
    b"-1\r\n\r\n",
    b"5;" + b"a" * 9000 + b"\r\nhello\r\n",
    b"x\r\n",
)
NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /healthz\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"\0" * 3000 + b"\r\n\r\n",
    b"\r\n" * 3000,
    b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: b\n\rc\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
)

SCHEMAS: list[Any] = [
    *({}, {"type": "object"}, {"type": "nothing"}, {"type": 5}, {"$ref": "#"}, {"$ref": "#/a/b"}, {"enum": []}),
    *({"type": "string", "pattern": pattern} for pattern in ("(a|aa)+$", "(")),
    *({"type": "string", "maxLength": 10**9}, {"type": "object", "minProperties": 10**6}, {"properties": []}),
    *({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"anyOf": []}, {"type": []}),
    {"allOf": [{"type": "string", "pattern": f"(a|b){{{n}}}.*"} for n in range(40)]},
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**400),
    *("", "a", "\0", "\U0001f600", "demo", "x" * 5000, "<|endoftext|>", "{{ 7 * 7 }}", [], [[]], [[0]], [None], [-1]),
    *({}, {"": None}, {"a": {"b": {}}}, {"0": 100}, {"2048": 1}, {"-1": 1}, {"\u00b2": 1}, [2047], [2048], ["a"] * 9),
]
CONTENTS: list[Any] = [
    *("Hi", "", None, [], [{"type": "image_url"}], "a" * 60_000),
    *([{"type": "text", "text": text}] for text in ("Hi", 5)),
]
_FIELDS = """
    model messages prompt max_tokens max_completion_tokens temperature top_p top_k n stop seed presence_penalty
    frequency_penalty logit_bias stream stream_options early_exit logprobs top_logprobs response_format tools
    tool_choice parallel_tool_calls functions audio echo best_of suffix user unknown
"""
FIELDS = _FIELDS.split()
_RESPONSES = """
    model input instructions previous_response_id max_output_tokens temperature top_p stream store tools tool_choice
    parallel_tool_calls text reasoning top_logprobs include metadata background unknown
"""
_MESSAGES = """
    model messages max_tokens system temperature top_p top_k stop_sequences stream tools tool_choice thinking
    output_config metadata context_management unknown
"""
_OLLAMA = "model messages prompt system images raw options format think tools stream keep_alive logprobs unknown"
ITEMS: list[Any] = [
    *("Hi", "", None, {"type": "text"}, {"type": "nothing"}, {"role": "nobody"}, {"type": "item_reference", "id": "x"}),
    *({"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in ("{", "[" * 5000, "{}")),
    *({"role": role, "content": content} for role in ("user", "assistant", "tool") for content in ("Hi", [], 5, None)),
    {"role": "user", "content": [{"type": "input_image", "image_url": "http://else.where/a.png"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": [{"type": "text"}]}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {"a": [[]]}}]},
    {"role": "user", "content": "Hi", "images": ["AAAA", "\0"]},
]


@dataclass(frozen=True)
class OtherInterface:
    """A path that is not of OpenAI's completions: its fields, those of a valid request, and how it is kept short."""

    fields: Sequence[str]
    valid: Mapping[str, Any]
    short: Mapping[str, Any]


OTHERS = {
    "/v1/responses": OtherInterface(_RESPONSES.split(), {"input": "Hi"}, {"max_output_tokens": MAX_NEW_TOKENS}),
    "/v1/messages": OtherInterface(
        _MESSAGES.split(), {"messages": [{"role": "user", "content": "Hi"}]}, {"max_tokens": MAX_NEW_TOKENS}
    ),
    "/api/chat": OtherInterface(
        _OLLAMA.split(),
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"options": {"num_predict": MAX_NEW_TOKENS}},
    ),
    "/api/generate": OtherInterface(_OLLAMA.split(), {"prompt": "Hi"}, {"options": {"num_predict": MAX_NEW_TOKENS}}),
    "/v1/embeddings": OtherInterface(["model", "input", "encoding_format", "dimensions"], {"input": "Hi"}, {}),
    "/api/show": OtherInterface(["model", "name", "verbose"], {}, {}),
}
CALL_ARGUMENTS = ('{"a": 1}', "{", "[" * 5000, '"\\ud800"', "NaN", "9" * 5000, "")


@dataclass(frozen=True)
class HttpMessages:
    """Makes requests.

    Args:
        random: decides everything.
        model: a name that the gateway serves.
    """

    random: random.Random
    model: str

    def generation(self, **more: Any) -> bytes:
        """A whole request to generate text, in good HTTP, with anything in its fields."""
        path, body = self.body()
        return request("POST", path, json.dumps({**body, **more}).encode())

    def body(self) -> tuple[str, dict[str, Any]]:
        """The path, and the fields of a request that is changed in a few of them."""
        chance = self.random
        if chance.random() < 0.4:
            return self._other(chance.choice(list(OTHERS)))
        is_chat = chance.random() < 0.6
        body: dict[str, Any] = {"model": self.model, "max_tokens": MAX_NEW_TOKENS, "temperature": 0}
        body |= {"messages": [self._message()]} if is_chat else {"prompt": "Once upon a time"}
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            name = chance.choice(FIELDS)
            body[name] = self._field(name)
        if body.get("max_tokens") is None:
            body["max_tokens"] = MAX_NEW_TOKENS
        if body.get("max_completion_tokens") is None:
            body.pop("max_completion_tokens", None)
        return "/v1/chat/completions" if is_chat else "/v1/completions", body

    def _other(self, path: str) -> tuple[str, dict[str, Any]]:
        chance, kind = self.random, OTHERS[path]
        body = {"model": self.model, **kind.valid}
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            name = chance.choice(kind.fields)
            several = [chance.choice(ITEMS) for _ in range(chance.choice([0, 1, 3]))]
            body[name] = several if name in ("messages", "input") and chance.random() < 0.8 else self._field(name)
        return path, {**body, **kind.short}

    def _field(self, name: str) -> Any:
        chance = self.random
        special: dict[str, Callable[[], Any]] = {
            "messages": lambda: [self._message() for _ in range(chance.choice([0, 1, 2, 5]))],
            "early_exit": lambda: {chance.choice(["threshold", "fill", "verify", "x"]): self._value()},
            "response_format": self._response_format,
            "tools": lambda: [self._tool() for _ in range(chance.choice([1, 2, 129]))],
            "stream_options": lambda: {"include_usage": self._value()},
            "tool_choice": lambda: {"type": "function", "function": {"name": chance.choice(["f", "g", ""])}},
            "prompt": lambda: chance.choice([["a"] * 2, [1, 2, 3], [[1], [2]], [1, "a"], "\0", "a" * 60_000, [True]]),
            "stop": lambda: chance.choice([["a"] * 16, ["a"] * 17, [""], "\n"]),
        }
        return special[name]() if name in special and chance.random() < 0.7 else self._value()

    def _response_format(self) -> dict[str, Any]:
        """Seldom a schema: each one is tried in a process of its own, which takes a second."""
        if self.random.random() < 0.15:
            return {"type": "json_schema", "json_schema": {"schema": self.random.choice(SCHEMAS)}}
        return {"type": self.random.choice(["text", "json_object", "json_schema", "xml", 5])}

    def _value(self) -> Any:
        return self.random.choice(VALUES)

    def _tool(self) -> dict[str, Any]:
        function = {"name": self.random.choice(["f", "g", "", "f f"]), "parameters": self.random.choice(SCHEMAS)}
        return {"type": self.random.choice(["function", "other"]), "function": function}

    def _message(self) -> dict[str, Any]:
        chance = self.random
        message: dict[str, Any] = {"role": "user", "content": "Once upon a time"}
        if chance.random() < 0.4:
            message |= {"role": chance.choice(["system", "developer", "assistant", "tool", "nobody"])}
            message |= {"content": chance.choice(CONTENTS)}
        if chance.random() < 0.2:
            function = {"name": "f", "arguments": chance.choice(CALL_ARGUMENTS)}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    def json_bytes(self) -> bytes:
        """A body that is no JSON, or JSON that takes much memory or many levels."""
        chance = self.random
        valid = json.dumps(self.body()[1]).encode()
        place = chance.randrange(len(valid))
        return chance.choice(
            [
                valid[:place],
                valid[:place] + bytes([chance.randrange(256)]) + valid[place + 1 :],
                valid.decode().encode("utf-16"),
                b"\xef\xbb\xbf" + valid,
                valid[:-1] + b', "user": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
                valid[:-1] + b', "tools": ' + b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"}",
                valid[:-1] + b', "user": [' + b"{}," * 100_000 + b"{}]}",
                valid[:-1] + b', "user": "\\ud800"}',
                valid[:-1] + b', "messages": [], "messages": 5}',
                b'"' + b"\\u0041" * 30_000 + b'"',
                b"",
            ]
        )

    def head(self) -> bytes:
        """A whole request with something odd in its first line or its headers."""
        chance = self.random
        method = chance.choice(METHODS) if chance.random() < 0.5 else "GET"
        headers = {"Host": chance.choice(HOSTS) if chance.random() < 0.4 else "127.0.0.1"}
        odd: dict[str, Callable[[], str]] = {
            "Origin": lambda: chance.choice(ORIGINS),
            "Sec-Fetch-Site": lambda: chance.choice(["cross-site", "same-origin", "none", "x" * 99]),
            "Authorization": lambda: chance.choice(["Bearer", "Bearer \xff", "Basic x", "Bearer " + "a" * 9000]),
            "Range": lambda: chance.choice(RANGES),
            "If-Modified-Since": lambda: chance.choice(["x", "Mon, 99 Abc 0000 99:99:99 +9999", "-1", "1" * 400]),
            "If-None-Match": lambda: chance.choice(["*", '"', "W/" * 2000]),
            "If-Range": lambda: chance.choice(["x", '"x"']),
            "Expect": lambda: chance.choice(["100-continue", "200-x"]),
            "Upgrade": lambda: chance.choice(["websocket", "h2c"]),
            "Connection": lambda: chance.choice(["close", "upgrade", "keep-alive, " * 500, "host"]),
            "Accept-Encoding": lambda: "gzip;q=x, " * 300,
            "Cookie": lambda: "a=b; " * 5000,
            "X-Swarm-Details": lambda: chance.choice(["1", ""]),
        }
        for name in chance.sample(sorted(odd), chance.choice([0, 1, 2, 3])):
            headers[name] = odd[name]()
        lines = [f"{method} {chance.choice(PATHS)} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def framing(self) -> bytes:
        """A request whose length is not clear, or bytes that are no HTTP."""
        chance = self.random
        if chance.random() < 0.3:
            return chance.choice(NOT_HTTP)
        lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1"]
        if chance.random() < 0.6:
            lines.append(f"Content-Length: {chance.choice(LENGTHS)}")
        if chance.random() < 0.6:
            lines.append(f"Transfer-Encoding: {chance.choice(ENCODINGS)}")
        sent = chance.choice([*CHUNKS, b"", b'{"model": "demo"}', b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + sent

    def large(self) -> bytes:
        """A request whose body is about as long as the limit, or longer."""
        size = self.random.choice([LIMIT_BYTES - 1000, LIMIT_BYTES, LIMIT_BYTES + 1, 2 * LIMIT_BYTES])
        body = json.dumps({"model": self.model, "prompt": "", "max_tokens": 1}).encode()
        return request("POST", "/v1/completions", body.replace(b'""', b'"' + b"a " * ((size - len(body)) // 2) + b'"'))


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request in good HTTP."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body
