"""`python -m swarm.monitor`, also `swarm monitor`: the monitor alone, on a port of its own."""

from __future__ import annotations

from pathlib import Path

import click

from swarm.common import console
from swarm.errors import InvalidOption


@click.command(name="monitor", cls=console.MultiAddressCommand, context_settings={"show_default": True})
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@console.initial_peers_option
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 lets everybody look.")
@click.option("--port", type=click.IntRange(0, 65535), default=8081, help="0 takes any free port.")
@click.option("--period", type=click.FloatRange(1, 600), default=10.0, help="Seconds between looks at the swarm.")
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that keeps the last hours over a restart.",
)
@console.log_format_option
@console.errors_to_exit_codes
def main(
    models: tuple[str, ...],
    initial_peers: tuple[str, ...],
    host: str,
    port: int,
    period: float,
    history: Path | None,
    log_format: str,
) -> None:
    """Serve a page that shows a swarm: its models, who holds which blocks, what is missing, and the last hours.

    It knows the swarm from its DHT alone, so it works for private swarms too. With names of models it shows these only.
    The same as JSON is at /api/v1/swarm.
    """
    peers = console.split_addresses(initial_peers)
    if not peers:
        raise InvalidOption(
            f"say which swarm to show: --initial-peers ADDRESS... ({console.INITIAL_PEERS_VARIABLE} stands in for it)"
        )
    import uvloop

    from swarm.monitor.standalone_server import serve
    from swarm.monitor.swarm_poller import SwarmPoller
    from swarm.transport.addresses import parse_peers
    from swarm.transport.p2p import quiet_hivemind
    from swarm.web.http_server import listen

    console.configure_logging(log_format)
    quiet_hivemind()
    watch = SwarmPoller(parse_peers(peers), models, period, history)
    with listen(host, port) as listening:
        uvloop.run(serve(watch, listening))


if __name__ == "__main__":
    main(prog_name="python -m swarm.monitor")
