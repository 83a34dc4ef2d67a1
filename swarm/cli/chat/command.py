"""The command `swarm chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import click

from swarm.common import console
from swarm.errors import InvalidOption


@click.command(name="chat", cls=console.MultiAddressCommand)
@click.argument("model", required=False)
@console.initial_peers_option
@console.membership_option
@console.digests_option
@console.audit_options
@console.weights_from_option
@console.draft_option
@click.option("--system", default="", help="System prompt: instructions for the model.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.  [default: the model's]"
)
@click.option("--max-tokens", type=click.IntRange(1, 2**31), help="Length limit of answers.  [default: 1024]")
@click.option(
    "--early-exit",
    type=click.FloatRange(0, 1),
    metavar="CONFIDENCE",
    help="Let tokens leave early where their confidence is above this. Each is verified, so answers stay the same.  "
    "[default: never]",
)
@console.errors_to_exit_codes
def main(
    model: str | None,
    initial_peers: tuple[str, ...],
    membership: str | None,
    digests: Path | None,
    audit: str,
    opinions: Path | None,
    weights_from: str,
    drafts: tuple[str, ...],
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    early_exit: float | None,
) -> None:
    """Chat with MODEL: a local folder, a GGUF file or a hub id, by default the demo model.

    If standard input is not a terminal, each of its lines is a message. Answers then go to standard output, everything
    else to standard error.
    """
    from swarm.cli.chat.conversation import AnswerOptions
    from swarm.cli.chat.dialogue import Dialogue, Terminal

    signal.signal(signal.SIGTERM, _exit_on_signal)
    terminal = Terminal()
    peers = console.split_addresses(initial_peers)
    if not peers:
        raise InvalidOption(
            f"a swarm is required: give --initial-peers ADDRESS..., or set {console.INITIAL_PEERS_VARIABLE}"
        )
    from swarm.transport.addresses import parse_peers

    peers = parse_peers(peers)  # before the slow imports
    if terminal.interactive:
        click.echo("Joining the swarm ...", err=True)
    from swarm.cli.chat.swarm_backend import SwarmBackend
    from swarm.client.config import NetworkOptions, parse_share
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    network = NetworkOptions(audit=parse_share("--audit", audit), digests=digests, opinions=opinions)
    backend = SwarmBackend(
        model, initial_peers=peers, membership=membership, network=network, weights_from=weights_from
    )
    try:
        backend.add_drafts(drafts)
        options = AnswerOptions(temperature, max_tokens, early_exit)
        Dialogue(backend, terminal, options, terminal.readable(system, "--system")).run()
    finally:
        backend.close()


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that the terminal is restored
