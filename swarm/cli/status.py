"""`swarm status`: what there is to see of a swarm, in the terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:
    from swarm.monitor.swarm_view import SwarmView

PERIOD = 10.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


@click.command(name="status", cls=console.MultiAddressCommand)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@console.initial_peers_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the same as the monitor's /api/v1/swarm.")
@click.option("--watch", "again", is_flag=True, help=f"Look again every {PERIOD:.0f} s, until Ctrl-C.")
@console.exit_codes
def main(models: tuple[str, ...], initial_peers: tuple[str, ...], as_json: bool, again: bool) -> None:
    """Show a swarm: its models, which blocks are served and how well, who serves them, and what is missing.

    One character of the strip is one block: higher is quicker, half is the median, a red × is missing. Only servers
    that clients can use together count. With names of models it shows these only.

    Exit code 0: there is a model and every block is served; 1: blocks or models are missing; 2: the swarm cannot be
    reached.
    """
    peers = console.split(initial_peers)
    if not peers:
        raise InvalidOption(
            f"say which swarm to show: --initial-peers ADDRESS... ({console.INITIAL_PEERS_VARIABLE} stands in for it)"
        )
    import uvloop

    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    complete = uvloop.run(_show(peers, models, as_json, again))
    sys.exit(0 if complete else 1)


async def _show(peers: tuple[str, ...], models: tuple[str, ...], as_json: bool, again: bool) -> bool:
    from swarm.monitor.dht_source import DhtSource
    from swarm.monitor.swarm_poller import look_once

    source = DhtSource(peers, models)
    try:
        while True:
            view = await look_once(source, peers, PERIOD)
            _print(view, as_json, clear=again and _on_terminal())
            if not again:
                return view.complete
            await asyncio.sleep(PERIOD)
    finally:
        await source.close()


def _print(view: SwarmView, as_json: bool, clear: bool) -> None:
    import msgspec

    from swarm.monitor.terminal_text import text

    if as_json:
        click.echo(msgspec.json.encode(view))
        return
    coloured = _on_terminal() and not os.environ.get("NO_COLOR")
    shown = text(view, shutil.get_terminal_size((100, 24)).columns)
    click.echo((CLEAR if clear else "") + (shown if coloured else click.unstyle(shown)), color=True)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli status")
