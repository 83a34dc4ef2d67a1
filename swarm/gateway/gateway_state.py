"""The state that all requests to a gateway share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from swarm.errors import format_blocks
from swarm.gateway.admission import AdmissionControl
from swarm.gateway.api_keys import ApiKey, KeyFile
from swarm.gateway.http.request_body import RequestMemory, RequestRoom
from swarm.gateway.openai.api_errors import NotFound, ServiceUnavailable
from swarm.gateway.response_store import ResponseStore
from swarm.gateway.settings import GatewaySettings
from swarm.generation.sequence_group import SequenceGroup
from swarm.generation.served_model import ServedModel
from swarm.metrics.client import ClientMetrics
from swarm.metrics.gateway import GatewayMetrics
from swarm.metrics.registry import Registry

T = TypeVar("T")

PREPARATION_THREADS = 4
"""Threads for the work before a generation, such as tokenizing a prompt."""

REQUEST_MEMORY_BYTES = 256 * 2**20
"""For all requests that are not admitted yet: without keys, thousands of connections could each send a large one."""

IMAGE_REQUEST_BYTES = 16 * 2**20
"""Of a request's body where a model takes images: a few of a phone, in base64."""

REQUESTS_IN_MEMORY = 16
"""Largest plain requests for which there is memory at least. One takes five times its bytes, with its decoded form."""

READINESS_TTL_S = 5.0
"""How long the result of a readiness check is used again."""


class GatewayState:
    """Models, keys, admission, metrics and threads of one gateway.

    Args:
        models: the first one is the chat page's default.
        settings: of the operator.
        keys: None lets everyone in.
        registry: for metrics.
    """

    def __init__(
        self, models: Sequence[ServedModel], settings: GatewaySettings, keys: KeyFile | None, registry: Registry
    ) -> None:
        self.models = {model.name: model for model in models}
        if not all(model.no_images for model in models):
            settings = replace(settings, max_request_bytes=max(settings.max_request_bytes, IMAGE_REQUEST_BYTES))
        self.settings = settings
        self.registry = registry
        self.admission = AdmissionControl(settings.max_concurrent_texts, settings.max_waiting, time.monotonic)
        self.request_memory = RequestMemory(max(REQUEST_MEMORY_BYTES, REQUESTS_IN_MEMORY * settings.max_request_bytes))
        self.metrics = GatewayMetrics(registry, self.models)
        self.metrics.track_admission(lambda: self.admission.running, lambda: self.admission.waiting)
        # For what blocks or computes for long before a generation: not in the event loop.
        self._threads = ThreadPoolExecutor(PREPARATION_THREADS, thread_name_prefix="swarm-gateway")
        self._thread_limits: dict[str, asyncio.Semaphore] = {}
        self.responses = ResponseStore()
        self._requests: set[SequenceGroup] = set()
        self._shutting_down = False
        self._keys = keys
        self._keys_lock = asyncio.Lock()
        self._readiness: tuple[float, str | None] = (float("-inf"), None)
        self._readiness_lock = asyncio.Lock()
        client_metrics = ClientMetrics(registry)
        for model in models:
            model.model.swarm.add_listener(client_metrics.on_event)

    async def keys(self) -> KeyFile | None:
        """The keys as they are in the file now."""
        if self._keys is not None and self._keys.is_outdated:
            async with self._keys_lock:  # in a thread: reading a file of thousands of keys takes a second
                self._keys = await asyncio.to_thread(self._keys.refreshed)
        return self._keys

    def model(self, name: str) -> ServedModel:
        """The model with this name.

        Raises:
            NotFound: there is no such model.
        """
        if name not in self.models:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this gateway has {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def run_in_thread(self, key: ApiKey | None, work: Callable[[], T]) -> T:
        """Run `work` in a thread: tokenizing a long text takes a while, and so does compiling a schema.

        A key gets at most half of the threads, so that its requests, however bad, do not block those of other keys.
        If this is cancelled, `work` does not begin; if it has begun, it keeps its thread, and the request, to its end.
        """
        name = key.name if key is not None else ""
        count = PREPARATION_THREADS // 2 if key is not None else PREPARATION_THREADS
        async with self._thread_limits.setdefault(name, asyncio.Semaphore(count)):
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(running)
            finally:
                await asyncio.wait({running})

    def request_room(self, key: ApiKey | None) -> RequestRoom:
        """Room for one more request, which is empty at first."""
        return RequestRoom(self.request_memory, key.name if key is not None else None)

    @contextmanager
    def abortable(self, request: SequenceGroup) -> Iterator[None]:
        """Inside of the context, a shutdown of the gateway aborts the request.

        Raises:
            ServiceUnavailable: the gateway is already shutting down.
        """
        if self._shutting_down:
            raise _shutdown_error()
        self._requests.add(request)
        try:
            yield
        finally:
            self._requests.remove(request)

    def abort_requests(self) -> None:
        """The gateway is shutting down: end all requests with an error that says so."""
        self._shutting_down = True
        for request in self._requests:
            request.abort(_shutdown_error())

    async def check_ready(self) -> None:
        """Check that servers hold all blocks of all models.

        Raises:
            ServiceUnavailable: blocks are missing.
        """
        # One check for all callers: they need no key, and each check occupies a thread for seconds.
        async with self._readiness_lock:
            checked_at, problem = self._readiness
            if time.monotonic() - checked_at > READINESS_TTL_S:
                problem = await asyncio.get_running_loop().run_in_executor(self._threads, self._find_missing_blocks)
                self._readiness = (time.monotonic(), problem)
        if problem is not None:
            raise ServiceUnavailable(problem, code="blocks_missing", retry_after_s=READINESS_TTL_S)

    def _find_missing_blocks(self) -> str | None:
        for model in self.models.values():
            missing = model.missing_blocks()
            if missing:
                return f"no server holds blocks {format_blocks(missing)} of {model.name}"
        return None

    def close(self) -> None:
        """End the threads. The models are closed by the code that loaded them."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _shutdown_error() -> ServiceUnavailable:
    return ServiceUnavailable(
        "this gateway is shutting down; try again in a moment", code="leaving", retry_after_s=READINESS_TTL_S
    )
