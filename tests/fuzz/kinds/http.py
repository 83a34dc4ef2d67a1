"""Clients of the gateway's HTTP interface, and of the servers' metrics, that send what they should not."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tests.fuzz.http_connection import Answer, HttpConnection
from tests.fuzz.http_messages import HttpMessages, request
from tests.fuzz.kinds import Kind, Violation
from tests.fuzz.targets import Targets

ANSWER_LIMIT_S = 60.0
"""The gateway ends what takes longer: it waits 30 s for a body, and for a prompt. A busy machine takes longer, too."""

STATUSES = frozenset({200, 206, 304, 307, 400, 401, 403, 404, 405, 408, 413, 416, 429, 431, 501, 503})
"""What may be answered. 500 is a bug of the gateway's; h11 says 501 to a request whose encoding it does not know."""

METRICS_STATUSES = STATUSES | {414, 505}
AT_ONCE = 8
ATTEMPTS = 30
HONEST = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


class Http(Kind):
    """Requests over connections of their own, or many over one. After each batch an honest request has to be answered
    with the text that it always gets, and the metrics of a server have to be there."""

    name: ClassVar[str] = "http"
    share: ClassVar[int] = 10

    async def open(self, targets: Targets) -> None:
        self._model = targets.model_folder.resolve().name
        self._gateway = _place(targets.gateway_url)
        self._metrics = [_place(target.metrics_url) for target in targets.servers]
        self._story = await self._tell()

    async def send(self, random: random.Random) -> int:
        messages = HttpMessages(random, self._model)
        plays: dict[Callable[[HttpMessages], Awaitable[int]], int] = {
            self._fields: 6,
            self._heads: 4,
            self._framings: 3,
            self._bodies: 2,
            self._pipeline: 2,
            self._aborts: 2,
            self._drips: 1,
            self._scrapes: 2,
        }
        play = random.choices(list(plays), list(plays.values()))[0]
        count = await play(messages)
        if await self._tell() != self._story:
            raise Violation("the gateway answers an honest request with another text than before")
        return count

    # What a batch is.

    async def _fields(self, messages: HttpMessages) -> int:
        """Requests with odd fields, one after the other on the same connection."""
        return await self._on_one_connection([messages.generation() for _ in range(20)])

    async def _heads(self, messages: HttpMessages) -> int:
        return await self._on_connections([messages.head() for _ in range(40)])

    async def _framings(self, messages: HttpMessages) -> int:
        return await self._on_connections([messages.framing() for _ in range(40)], ends=True)

    async def _bodies(self, messages: HttpMessages) -> int:
        bodies = [request("POST", "/v1/chat/completions", messages.json_bytes()) for _ in range(30)]
        return await self._on_connections([*bodies, messages.large()])

    async def _pipeline(self, messages: HttpMessages) -> int:
        """All at once, without waiting for answers, which have to come in order."""
        paths = [messages.random.choice(["/healthz", "/v1/models", "/nothing"]) for _ in range(60)]
        expected = [404 if path == "/nothing" else 200 for path in paths]
        async with HttpConnection(self._gateway) as connection:
            answers = [await _ask(connection, b"".join(request("GET", path) for path in paths))]
            answers += [await _ask(connection, b"") for _ in paths[1:] if connection.is_open]
        if [answer.status for answer in answers] != expected:
            raise Violation(f"requests in a row were answered with {[answer.status for answer in answers]}")
        for path, answer in zip(paths, answers, strict=True):
            self._count(answer, request("GET", path))
        return len(paths)

    async def _aborts(self, messages: HttpMessages) -> int:
        """Streams whose clients leave after their first bytes, or before them."""
        patience = [messages.random.choice([0.0, 0.02, 0.2]) for _ in range(10)]
        sent = [messages.generation(stream=True, max_tokens=200, n=2) for _ in patience]
        await asyncio.gather(*(self._abort(one, left_s) for one, left_s in zip(sent, patience, strict=True)))
        return len(patience)

    async def _abort(self, sent: bytes, left_s: float) -> None:
        _, writer = await asyncio.open_connection(*self._gateway)
        writer.write(sent)
        await asyncio.sleep(left_s)
        writer.transport.abort()  # a reset, not an end
        self.outcomes["aborted"] += 1

    async def _drips(self, messages: HttpMessages) -> int:
        """Requests that come a few bytes at a time, and then end."""
        whole = [messages.random.choice([messages.head, messages.generation])() for _ in range(10)]
        await asyncio.gather(*(self._drip(sent) for sent in whole))
        return len(whole)

    async def _drip(self, sent: bytes) -> None:
        _, writer = await asyncio.open_connection(*self._gateway)
        with suppress(ConnectionError):
            for place in range(0, min(len(sent) - 1, 200), 10):
                writer.write(sent[place : place + 10])
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.transport.abort()
        self.outcomes["dripped"] += 1

    async def _scrapes(self, messages: HttpMessages) -> int:
        """The metrics' endpoint of a server."""
        place = messages.random.choice(self._metrics)
        sent = [messages.random.choice([messages.head, messages.framing])() for _ in range(20)]
        for one in sent:
            self._count(await _ask_once(place, one, ends=True), one, METRICS_STATUSES)
        answer = await _ask_once(place, request("GET", "/metrics"))
        if answer.status != 200 or b"swarm_server_" not in answer.body:
            raise Violation(f"the metrics of a server are gone: {answer.status}")
        return len(sent)

    # Over connections.

    async def _on_one_connection(self, requests: list[bytes]) -> int:
        async with HttpConnection(self._gateway) as connection:
            for sent in requests:
                self._count(await _ask(connection, sent), sent)
        return len(requests)

    async def _on_connections(self, requests: list[bytes], ends: bool = False) -> int:
        for first in range(0, len(requests), AT_ONCE):
            some = requests[first : first + AT_ONCE]
            answers = await asyncio.gather(*(_ask_once(self._gateway, sent, ends) for sent in some))
            for sent, answer in zip(some, answers, strict=True):
                self._count(answer, sent)
        return len(requests)

    def _count(self, answer: Answer, sent: bytes, statuses: frozenset[int] = STATUSES) -> None:
        if answer.status and answer.status not in statuses:
            raise Violation(f"a request was answered with status {answer.status}: {answer.body[:300]!r}")
        if answer.status < 400 or not answer.body.startswith(b'{"error"'):
            self.outcomes[str(answer.status) if answer.status else "closed"] += 1
        else:
            self.outcomes[_code(answer, sent)] += 1

    async def _tell(self) -> str:
        """The answer to the honest request."""
        body = json.dumps({"model": self._model, **HONEST}).encode()
        answer = Answer()
        for _ in range(ATTEMPTS):
            answer = await _ask_once(self._gateway, request("POST", "/v1/completions", body))
            if answer.status == 200:
                text: str = json.loads(answer.body)["choices"][0]["text"]
                return text
            if answer.status not in (429, 503):
                break
            await asyncio.sleep(1.0)  # as many as there are places for are being answered, or a server has no room
        raise Violation(f"an honest request is answered with status {answer.status}: {answer.body[:300]!r}")


async def _ask(connection: HttpConnection, sent: bytes, ends: bool = False) -> Answer:
    """The answer to one request. Raises `Violation` if there is none in time."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await connection.send(sent, ends)
            return await connection.receive("HEAD" if sent.startswith(b"HEAD ") else "GET")
    except TimeoutError:
        raise Violation(f"a request was not answered in {ANSWER_LIMIT_S:.0f} s: {_describe(sent)}") from None


async def _ask_once(place: tuple[str, int], sent: bytes, ends: bool = False) -> Answer:
    """The answer to a request on a connection of its own.

    Args:
        ends: end the sending side a moment later, because the request may be incomplete.
    """
    async with HttpConnection(place) as connection:
        return await _ask(connection, sent, ends)


def _describe(sent: bytes) -> str:
    return f"{sent[:300]!r} ({len(sent)} bytes)"


def _code(answer: Answer, sent: bytes) -> str:
    """How a refusal counts: by its code, in the form that OpenAI's errors have; Ollama's are a sentence."""
    try:
        error: Any = json.loads(answer.body)["error"]
        if isinstance(error, str) and b" /api/" in sent:
            return f"{answer.status} in Ollama's form"
        return f"{answer.status} {error['code'] or error['type']}"
    except (ValueError, LookupError, TypeError):
        raise Violation(f"a refusal of {_describe(sent)} is in another form: {answer.body[:300]!r}") from None


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
