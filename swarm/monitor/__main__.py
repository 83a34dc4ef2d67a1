"""`python -m swarm.monitor`, also `swarm monitor`: runs the monitor alone, on its own port."""

from __future__ import annotations

import functools
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:
    from swarm.monitor.swarm_poller import SwarmPoller

logger = logging.getLogger("swarm.monitor")

MAX_CONNECTIONS = 512
"""Maximum number of open connections."""


@click.command(name="monitor", cls=console.MultiAddressCommand, context_settings={"show_default": True})
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@console.initial_peers_option
@console.membership_option
@console.opinions_option(console.SHOWN_OPINIONS)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 makes the page public.")
@click.option("--port", type=click.IntRange(0, 65535), default=8081, help="0 takes any free port.")
@console.log_format_option
@console.errors_to_exit_codes
def main(
    models: tuple[str, ...],
    initial_peers: tuple[str, ...],
    membership: str | None,
    opinions: Path | None,
    host: str,
    port: int,
    log_format: str,
) -> None:
    """Serve a page that shows a swarm: its models, which servers hold which blocks, missing blocks, and a history.

    It reads the swarm's DHT only, so it works for private swarms too. Give names of models to see only those. The same
    data is available as JSON at /api/v1/swarm.
    """
    peers = console.split_addresses(initial_peers)
    if not peers:
        raise InvalidOption(
            f"no swarm to show: give --initial-peers ADDRESS..., or set {console.INITIAL_PEERS_VARIABLE}"
        )
    import uvloop

    from swarm.membership.invite import read_invite
    from swarm.monitor.swarm_poller import SwarmPoller
    from swarm.transport.addresses import parse_peers
    from swarm.transport.p2p import quiet_hivemind
    from swarm.trust.opinion_file import read_opinions
    from swarm.web.http_server import listen

    console.configure_logging(log_format)
    quiet_hivemind()
    source = dict if opinions is None else functools.partial(read_opinions, opinions)
    source()  # raises if the file cannot be read
    poller = SwarmPoller(parse_peers(peers), models, membership=read_invite(membership), opinions=source)
    with listen(host, port) as listening:
        uvloop.run(_serve(poller, listening))


async def _serve(poller: SwarmPoller, listening: socket.socket) -> None:
    """Run the poller and its pages until SIGINT or SIGTERM."""
    from starlette.applications import Starlette

    from swarm.monitor.http_routes import make_routes
    from swarm.web.http_server import serve_until_signal, url_of

    await poller.start()
    try:
        logger.info("Monitor: %s", url_of(listening))
        await serve_until_signal(Starlette(routes=make_routes(poller)), listening, MAX_CONNECTIONS)
    finally:
        await poller.stop()


if __name__ == "__main__":
    main(prog_name="python -m swarm.monitor")
