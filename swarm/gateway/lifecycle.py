"""The life of a gateway process: join the swarm with every model, listen, serve, and leave."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount

from swarm.errors import AdapterMismatch, InvalidOption
from swarm.gateway.access import RequireApiKey, is_loopback
from swarm.gateway.api_keys import KeyFile
from swarm.gateway.app import make_app
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.openai.api_errors import ServiceUnavailable
from swarm.gateway.settings import GatewaySettings
from swarm.generation.prefix_store import PrefixStore, default_bytes
from swarm.generation.served_model import ServedModel, add_drafts
from swarm.metrics.registry import EventLoopMetrics, new_registry
from swarm.monitor.http_routes import make_routes
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import listen, serve_until_signal, url_of

logger = logging.getLogger("swarm.gateway")

MAX_CONNECTIONS = 2000
"""Open at the same time. The usual limit is the number of files that a process may have open."""


@dataclass(frozen=True)
class ListenAddress:
    """Where the gateway listens; port 0 takes any free one."""

    host: str
    port: int


def serve_gateway(
    sources: Sequence[str | None],
    options: Mapping[str, Any],
    settings: GatewaySettings,
    key_file: Path | None,
    address: ListenAddress,
    with_monitor: bool,
    exits: Sequence[Path] = (),
    drafts: Sequence[str] = ("copies",),
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        sources: local folder or hub id of each model; None for the demo model.
        options: of `from_pretrained`, for all models.
        key_file: None lets everyone in.
        with_monitor: whether the monitor is at `/monitor/`.
        exits: folders of `model.save_exits`, each for one of the models.
        drafts: see `add_drafts`.
        on_ready: called with the gateway's URL when it accepts requests.

    Raises:
        KeyFileError: the key file cannot be used.
        InvalidOption: other machines can reach the gateway, and it has neither keys nor `settings.open`; or a draft is
            for none of the models.
        AddressUnavailable: the address is taken or does not exist.
        UsageError: a model cannot be loaded, or no initial peer answers, see `from_pretrained`.
        AdapterMismatch, AdapterError: exits are for none of the models, or cannot be read.
    """
    keys = KeyFile.read(key_file) if key_file is not None else None
    with ExitStack() as stack:
        listening = stack.enter_context(listen(address.host, address.port))
        _require_keys(address, settings, has_keys=keys is not None, is_reachable=not is_loopback(listening))
        models = _load_models(stack, sources, options, exits)
        add_drafts(models, drafts)
        memory = default_bytes() if settings.prefix_memory is None else settings.prefix_memory
        for served in models:
            served.prefixes = PrefixStore(memory // len(models))
        gateway = GatewayState(models, settings, keys, new_registry())
        stack.callback(gateway.close)
        joined = models[0].model.swarm.config
        swarms = [one.model.swarm for one in models]
        poller = (
            SwarmPoller(
                joined.initial_peers,
                membership=joined.membership,
                opinions=lambda: dict(ChainMap(*(swarm.opinions() for swarm in swarms))),
            )
            if with_monitor
            else None
        )
        check_host = keys is None or bool(settings.host_names)
        uvloop.run(_serve(gateway, poller, listening, check_host, on_ready))
        logger.info("Leaving the swarm")


async def _serve(
    gateway: GatewayState,
    poller: SwarmPoller | None,
    listening: socket.socket,
    check_host: bool,
    on_ready: Callable[[str], None],
) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    url = url_of(listening)
    routes: list[BaseRoute] = []
    if poller is not None:
        protection = [Middleware(RequireApiKey, gateway=gateway)]
        routes.append(Mount("/monitor", routes=make_routes(poller), middleware=protection))
        await poller.start()
    tasks = [asyncio.create_task(work) for work in (_log_readiness(gateway), EventLoopMetrics(gateway.registry).run())]
    try:
        logger.info("Gateway: %s", url)
        logger.info("OpenAI's interface: %sv1", url)
        on_ready(url)
        await serve_until_signal(
            make_app(gateway, routes, check_host), listening, MAX_CONNECTIONS, gateway.abort_requests
        )
    finally:
        for task in tasks:
            task.cancel()
        if poller is not None:
            await poller.stop()


def _require_keys(address: ListenAddress, settings: GatewaySettings, *, has_keys: bool, is_reachable: bool) -> None:
    if has_keys and settings.open:
        raise InvalidOption("--open lets everyone in, and --keys only those who have one; leave one of them out")
    if has_keys or not is_reachable:
        return
    if not settings.open:
        raise InvalidOption(
            f"--host {address.host} lets other machines reach this gateway, and it has no keys: make some with `swarm "
            "keys add NAME --file keys.yaml` and give it --keys keys.yaml, or let everyone use it with --open"
        )
    logger.warning("Everyone who can reach %s may use this gateway, as --open says", address.host)


async def _log_readiness(gateway: GatewayState) -> None:
    """Check the swarm once at the start, so that the first request does not have to."""
    try:
        await gateway.check_ready()
        logger.info("Ready: servers hold every block")
    except ServiceUnavailable as error:
        logger.warning("%s; requests wait for them", error)


def _load_models(
    stack: ExitStack,
    sources: Sequence[str | None],
    options: Mapping[str, Any],
    exits: Sequence[Path],
) -> list[ServedModel]:
    """The models with their exits. `stack` closes them."""
    models = []
    for source in sources:
        served = ServedModel.load(source, **options)
        stack.callback(served.close)
        swarm = served.model.swarm
        logger.info("Model: %s, %d blocks, wire format %s", served.name, swarm.blocks, swarm.config.wire)
        models.append(served)
    for folder in exits:
        _load_exits(models, folder)
    return models


def _load_exits(models: Sequence[ServedModel], folder: Path) -> None:
    """Give the exits to the model for which they were trained."""
    mismatches: list[AdapterMismatch] = []
    for served in models:
        try:
            served.model.load_exits(folder)
        except AdapterMismatch as error:
            mismatches.append(error)
        else:
            logger.info("Exits of %s: %s", served.name, folder)
            return
    raise mismatches[-1]
