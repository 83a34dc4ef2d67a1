"""`swarm status`: shows the state of a swarm in the terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:
    from swarm.monitor.swarm_poller import DhtSource
    from swarm.monitor.swarm_view import SwarmView

PERIOD_S = 10.0
CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"


@click.command(name="status", cls=console.MultiAddressCommand)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@console.initial_peers_option
@console.membership_option
@console.opinions_option(console.SHOWN_OPINIONS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the same as the monitor's /api/v1/swarm.")
@click.option("--watch", "repeat", is_flag=True, help=f"Refresh every {PERIOD_S:.0f} s, until Ctrl-C.")
@console.errors_to_exit_codes
def main(
    models: tuple[str, ...],
    initial_peers: tuple[str, ...],
    membership: str | None,
    opinions: Path | None,
    as_json: bool,
    repeat: bool,
) -> None:
    """Show a swarm: its models, which servers hold which blocks, their throughput, and what is missing.

    Each character of the strip is one block: a higher bar is faster, half height is the median, and a red × is a
    missing block. Only servers that clients can use together count. Give names of models to see only those.

    Exit code 0: there is a model and every block is served; 1: blocks or models are missing; 2: the swarm cannot be
    reached.
    """
    peers = console.split_addresses(initial_peers)
    if not peers:
        raise InvalidOption(
            f"no swarm to show: give --initial-peers ADDRESS..., or set {console.INITIAL_PEERS_VARIABLE}"
        )
    import uvloop

    from swarm.membership.invite import read_invite
    from swarm.monitor.swarm_poller import DhtSource
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    source = DhtSource(peers, models, read_invite(membership))
    complete = uvloop.run(_show(source, peers, opinions, as_json, repeat))
    sys.exit(0 if complete else 1)


async def _show(source: DhtSource, peers: tuple[str, ...], opinions: Path | None, as_json: bool, repeat: bool) -> bool:
    from swarm.monitor.swarm_poller import poll_once
    from swarm.trust.opinion_file import read_opinions

    try:
        while True:
            known = read_opinions(opinions) if opinions is not None else {}
            view = await poll_once(source, peers, PERIOD_S, known)
            _print(view, as_json, clear=repeat and _on_terminal())
            if not repeat:
                return view.complete
            await asyncio.sleep(PERIOD_S)
    finally:
        await source.close()


def _print(view: SwarmView, as_json: bool, clear: bool) -> None:
    import msgspec

    from swarm.monitor.terminal_text import format_swarm

    if as_json:
        click.echo(msgspec.json.encode(view))
        return
    colored = _on_terminal() and not os.environ.get("NO_COLOR")
    shown = format_swarm(view, shutil.get_terminal_size((100, 24)).columns)
    click.echo((CLEAR_SCREEN if clear else "") + (shown if colored else click.unstyle(shown)), color=True)


def _on_terminal() -> bool:
    return sys.stdout.isatty()
