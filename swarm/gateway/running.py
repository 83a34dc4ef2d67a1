"""A gateway's life: join the swarm with every model, listen, answer, leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from starlette.middleware import Middleware
from starlette.routing import Mount

from swarm.gateway.app import make_app
from swarm.gateway.entrance import NeedsKey
from swarm.gateway.failures import Unavailable
from swarm.gateway.keys import KeyFile
from swarm.gateway.local_names import is_loopback
from swarm.gateway.service import ServedModel, Service, Settings
from swarm.metrics.registry import new_registry
from swarm.monitor.http_routes import make_routes
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import address_of, listen, serve_until_asked

logger = logging.getLogger("swarm.gateway")

CONNECTIONS = 2000
"""Open at once; files that a process may have open are the usual limit."""


@dataclass(frozen=True)
class Listening:
    """Where."""

    host: str
    port: int


def run(
    sources: Sequence[str | None],
    options: Mapping[str, Any],
    settings: Settings,
    key_file: Path | None,
    where: Listening,
    shows_swarm: bool,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        sources: local folder or hub id of each model; None for the demo model.
        options: of `from_pretrained`, for all models.
        settings: see `Settings`.
        key_file: None lets everybody in.
        where: address to listen on.
        shows_swarm: whether the monitor is at `/monitor/`.
        ready: called with the gateway's URL once it answers.

    Raises `UsageError` of the fitting kind.
    """
    keys = KeyFile.read(key_file) if key_file is not None else None
    with ExitStack() as stack:
        listening = stack.enter_context(listen(where.host, where.port))
        models = [_load(stack, source, options) for source in sources]
        service = Service(models, settings, keys, new_registry())
        stack.callback(service.close)
        watch = SwarmPoller(models[0].model.swarm.config.initial_peers) if shows_swarm else None

        def hang_up() -> None:
            service.hang_up()
            if watch is not None:
                watch.hang_up()

        async def work() -> None:
            guard = [Middleware(NeedsKey, service=service)]
            routes = [Mount("/monitor", routes=make_routes(watch), middleware=guard)] if watch is not None else []
            if watch is not None:
                await watch.start()
            telling = asyncio.create_task(_tell_readiness(service))
            try:
                logger.info("Gateway: %s", address_of(listening))
                logger.info("OpenAI's interface: %sv1", address_of(listening))
                ready(address_of(listening))
                only_local = keys is None and is_loopback(listening)
                if keys is None and not only_local:
                    logger.warning("Everybody who reaches %s may use this gateway: give it --keys", where.host)
                await serve_until_asked(make_app(service, routes, only_local), listening, CONNECTIONS, hang_up)
            finally:
                telling.cancel()
                if watch is not None:
                    await watch.stop()

        uvloop.run(work())
        logger.info("Leaving the swarm")


async def _tell_readiness(service: Service) -> None:
    """A first look at the swarm, which the first request then need not take."""
    try:
        await service.check_ready()
        logger.info("Every block is served")
    except Unavailable as missing:
        logger.warning("%s; requests wait for them", missing)


def _load(stack: ExitStack, source: str | None, options: Mapping[str, Any]) -> ServedModel:
    served = ServedModel.load(source, **options)
    stack.callback(served.model.swarm.close)
    connection = served.model.swarm
    logger.info("Model: %s, %d blocks, travelling as %s", served.name, connection.blocks, connection.config.wire)
    return served
