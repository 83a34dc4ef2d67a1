"""`swarm chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:
    from swarm.cli.chat.conversation import Talk

KEY_VARIABLE = "SWARM_API_KEY"


@click.command(name="chat", cls=console.MultiAddressCommand)
@click.argument("model", required=False)
@console.initial_peers_option
@click.option("--url", help="Talk by way of a gateway, such as http://127.0.0.1:8000/v1, instead of joining the swarm.")
@click.option("--key", envvar=KEY_VARIABLE, help=f"The gateway's key. {KEY_VARIABLE} stands in for the option.")
@click.option("--system", default="", help="How the model shall behave.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 takes the likeliest.  [default: the model's]")
@click.option(
    "--max-tokens", type=click.IntRange(1, 2**31), help="Length of answers.  [default: 1024, or the gateway's]"
)
@click.option("--seed", type=click.IntRange(-(2**63), 2**63 - 1), help="The same seed gives the same answers.")
@console.exit_codes
def main(
    model: str | None,
    initial_peers: tuple[str, ...],
    url: str | None,
    key: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
) -> None:
    """Talk with MODEL: a local folder, a hub id, or nothing for the demo model; with --url one of the gateway's.

    Where standard input is no terminal every line of it is a message; answers go to standard output, all else to
    standard error.
    """
    from swarm.cli.chat.conversation import Wishes
    from swarm.cli.chat.dialogue import Dialogue
    from swarm.cli.chat.terminal import Terminal

    signal.signal(signal.SIGTERM, _leave)
    terminal = Terminal()
    with terminal.conversation():
        with terminal.working():
            talk = _talk(terminal.interactive, model, console.split(initial_peers), url, key)
        try:
            Dialogue(talk, terminal, Wishes(temperature, max_tokens, seed), system).run()
        finally:
            talk.close()


def _talk(interactive: bool, model: str | None, peers: tuple[str, ...], url: str | None, key: str | None) -> Talk:
    if url is not None:
        from swarm.cli.chat.over_http import GatewayTalk

        return GatewayTalk(url, key, model)
    if not peers:
        raise InvalidOption(
            "say whom to talk with: --initial-peers ADDRESS... of a swarm "
            f"({console.INITIAL_PEERS_VARIABLE} stands in for it), or --url of a gateway"
        )
    from swarm.transport.addresses import parse_peers

    peers = parse_peers(peers)  # before all that is slow to load
    if interactive:
        click.echo("Joining the swarm ...", err=True)
    from swarm.cli.chat.over_swarm import SwarmTalk
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    return SwarmTalk(model, initial_peers=peers)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as an exception, so that the terminal is left as it was


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.chat.command")
