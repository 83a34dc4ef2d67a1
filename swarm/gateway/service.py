"""The models that a gateway serves, and what its requests have to share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from swarm.client.auto_model import AutoDistributedModelForCausalLM
from swarm.client.threads.compute_lock import ComputeLock
from swarm.errors import format_blocks
from swarm.gateway.failures import ApiFailure, NotFound, Unavailable
from swarm.gateway.http import Room, unless_gone
from swarm.gateway.keys import Key, KeyFile
from swarm.gateway.limits import Admission
from swarm.gateway.response_format import Grammars
from swarm.generation.tool_calls import ToolSyntax, tool_syntax
from swarm.metrics.client import ClientMetrics
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import Registry
from swarm.models.checkpoints.chat_template import template_text
from swarm.models.checkpoints.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNKNOWN_CONTEXT = 8192
"""Tokens that are taken for the longest text of a model whose config does not say."""

WORKERS = 4
"""Threads for what comes before a generation."""

BODIES = 256 * 2**20
"""Bytes of bodies that are read at once: without keys, thousands of connections could send a large one each."""

FRESH = 5.0
"""Seconds that an answer about readiness is good for."""


@dataclass(frozen=True)
class Settings:
    """What a person decides about a gateway.

    Attributes:
        default_tokens: new tokens of an answer whose request does not say.
        request_bytes: that a request's body may have.
        read_seconds: within which a request's body has to come.
        send_seconds: within which a client has to take the next part of its answer.
        origins: web pages from elsewhere that may use this gateway (CORS); none by default.
        concurrent: texts that are computed at once; a request has one for each of its answers.
        queue: requests that may wait.
        public_status: whether metrics and monitor need no key where there are keys.
    """

    default_tokens: int = 1024
    request_bytes: int = 2 * 2**20
    read_seconds: float = 30.0
    send_seconds: float = 60.0
    origins: tuple[str, ...] = ()
    concurrent: int = 64
    queue: int = 256
    public_status: bool = False


class HangsUp(Protocol):
    """A request that is being answered."""

    def hang_up(self, failure: ApiFailure) -> None:
        """End the reply with this failure, now."""


@dataclass
class ServedModel:
    """One model and what its requests share.

    Attributes:
        name: what clients call it.
        model: its distributed client.
        created: Unix time.
    """

    name: str
    model: Any
    tokenizer: Any
    baton: ComputeLock = field(default_factory=ComputeLock)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, source: str | None, **options: Any) -> ServedModel:
        """Load embeddings, head and tokenizer, and join the swarm.

        Args:
            source: local folder or hub id; None for the demo model.
            options: of `from_pretrained`.

        Raises `UsageError` of the fitting kind.
        """
        model = AutoDistributedModelForCausalLM.from_pretrained(source, **options)
        try:
            checkpoint = model.trained.checkpoint
            tokenizer = load_tokenizer(checkpoint.source, checkpoint.revision)
        except BaseException:
            model.swarm.close()
            raise
        return cls(checkpoint.name, model, tokenizer)

    @property
    def context_length(self) -> int:
        """Tokens that a text may have, prompt and answer together."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or UNKNOWN_CONTEXT)

    @property
    def vocabulary(self) -> int:
        """Scores that the head gives."""
        return int(self.model.config.vocab_size)

    @cached_property
    def chat_template(self) -> str | None:
        return template_text(self.tokenizer)

    @cached_property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes calls of tools, if its template knows tools."""
        return tool_syntax(self.chat_template) if self.chat_template is not None else None

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocabulary, sorted(self.ends))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens with which an answer ends."""
        end = self.model.generation_config.eos_token_id
        return frozenset([end] if isinstance(end, int) else end or ())

    def missing(self) -> tuple[int, ...]:
        """Blocks that nobody holds now. Looks at the swarm, so it may take seconds."""
        held = {block for server in self.model.swarm.servers() for block in range(server.span.start, server.span.end)}
        wanted = range(self.model.swarm.span.start, self.model.swarm.span.end)
        return tuple(block for block in wanted if block not in held)

    def described(self) -> dict[str, Any]:
        """The model object of OpenAI's API, with ours under `swarm`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "swarm",
            "swarm": {
                "chat_template": self.chat_template is not None,
                "tools": self.tool_syntax is not None,
                "context_length": self.context_length,
                "blocks": self.model.swarm.blocks,
            },
        }


class Service:
    """Everything that the gateway's addresses work with.

    Args:
        models: by name, the first one the default of the chat page.
        settings: see `Settings`.
        keys: None lets everybody in.
        registry: for metrics.
    """

    def __init__(
        self, models: Sequence[ServedModel], settings: Settings, keys: KeyFile | None, registry: Registry
    ) -> None:
        self.models = {model.name: model for model in models}
        self.settings = settings
        self.registry = registry
        self.admission = Admission(settings.concurrent, settings.queue, time.monotonic)
        self.room = Room(max(BODIES, settings.request_bytes))
        self.metrics = GatewayMetrics(registry, self.models)
        self.metrics.watch(lambda: self.admission.running, lambda: self.admission.waiting)
        # What blocks for long or computes much before a generation begins: not in the event loop.
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="swarm-gateway")
        self._preparing: dict[str, asyncio.Semaphore] = {}
        self._open: set[HangsUp] = set()
        self._leaving = False
        self._keys = keys
        self._ready: tuple[float, str | None] = (float("-inf"), None)
        self._looking = asyncio.Lock()
        self._reading = asyncio.Lock()
        heard = ClientMetrics(registry).heard
        for model in models:
            model.model.swarm.listen(heard)

    async def keys(self) -> KeyFile | None:
        """The keys as they are in the file now."""
        if self._keys is not None and self._keys.is_old:
            async with self._reading:  # in a thread: a file of thousands of keys takes a second
                self._keys = await asyncio.to_thread(self._keys.refreshed)
        return self._keys

    def model(self, name: str) -> ServedModel:
        """The model of that name. Raises `NotFound`."""
        if name not in self.models:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this gateway has {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def prepare(self, receive: Receive, key: Key | None, make: Callable[[], T]) -> T:
        """What `make` returns, made in a thread: a long text takes a while to become tokens, a schema a grammar.

        A key gets half of the threads at most, so that what it sends, however bad, keeps nobody else waiting. Whoever
        leaves before it is his turn takes none: raises `Gone`.
        """
        name = key.name if key is not None else ""
        mine = self._preparing.setdefault(name, asyncio.Semaphore(WORKERS // 2 if key is not None else WORKERS))
        await unless_gone(receive, mine.acquire())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, make)
        finally:
            mine.release()

    @contextmanager
    def open(self, answering: HangsUp) -> Iterator[None]:
        """While a request is answered. Raises `Unavailable` when the gateway is leaving."""
        if self._leaving:
            raise _leaving()
        self._open.add(answering)
        try:
            yield
        finally:
            self._open.remove(answering)

    def hang_up(self) -> None:
        """The gateway is leaving: end what is under way, and say so."""
        self._leaving = True
        for answering in self._open:
            answering.hang_up(_leaving())

    async def check_ready(self) -> None:
        """Raises `Unavailable` unless somebody holds each block of each model."""
        async with self._looking:  # one look for all: whoever asks needs no key, and a look takes a thread for seconds
            looked, trouble = self._ready
            if time.monotonic() - looked > FRESH:
                trouble = await asyncio.get_running_loop().run_in_executor(self._workers, self._trouble)
                self._ready = (time.monotonic(), trouble)
        if trouble is not None:
            raise Unavailable(trouble, code="blocks_missing", retry_after=FRESH)

    def _trouble(self) -> str | None:
        for model in self.models.values():
            missing = model.missing()
            if missing:
                return f"nobody holds blocks {format_blocks(missing)} of {model.name}"
        return None

    def close(self) -> None:
        """End its threads. The models belong to whoever loaded them."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _leaving() -> Unavailable:
    return Unavailable("this gateway is shutting down; try again in a moment", code="leaving", retry_after=FRESH)
