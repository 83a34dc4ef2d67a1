"""`swarm members`: the authority of a private swarm, which invites members and revokes their invites."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import MembershipError

if TYPE_CHECKING:
    from swarm.membership.authority import Authority

FILE_VARIABLE = "SWARM_MEMBERS_FILE"
DEFAULT_FILE = Path("~/.config/swarm/members.json")

_file_option = click.option(
    "--file",
    "path",
    default=DEFAULT_FILE,
    show_default=True,
    envvar=FILE_VARIABLE,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda context, parameter, value: value.expanduser(),
    help=f"File with the authority's secret key. {FILE_VARIABLE} stands in for it.",
)


@click.group(name="members")
def main() -> None:
    """Decide who belongs to a private swarm. Its peers answer only members, whom this authority has invited."""


@main.command()
@_file_option
@console.errors_to_exit_codes
def init(path: Path) -> None:
    """Make a new authority, for a new private swarm. The person who has its file decides who belongs to the swarm."""
    from swarm.membership.authority import create_authority

    authority = create_authority(path)
    click.echo(f"Authority {authority.fingerprint} in {path}. Keep a copy of the file in a safe place.", err=True)
    click.echo("Next: swarm members invite NAME, for yourself too", err=True)


@main.command()
@click.argument("name")
@_file_option
@click.option(
    "--days",
    type=float,
    default=30.0,
    show_default=True,
    help="How long the invite is valid.",
)
@console.errors_to_exit_codes
def invite(name: str, path: Path, days: float) -> None:
    """Print an invite for NAME: one line, for all peers that this member runs. It is a secret, and is shown only once.

    A member gets a new one before the old one expires; both are valid until then.
    """
    from swarm.membership.authority import invite_member

    made = invite_member(path, name, days, time.time())
    click.echo(made.to_line())
    click.echo(f"Invited {made.certificate.describe()}. Pass the line to --membership, or set it as", err=True)
    click.echo(f"{console.MEMBERSHIP_VARIABLE}. Whoever has it is {name} to the swarm.", err=True)


@main.command(cls=console.MultiAddressCommand)
@click.argument("name")
@_file_option
@console.initial_peers_option
@console.errors_to_exit_codes
def revoke(name: str, path: Path, initial_peers: tuple[str, ...]) -> None:
    """Revoke all invites of NAME, and tell the peers of the swarm. They end the member's connections at once."""
    from swarm.membership.authority import read_authority, revoke_member

    count = revoke_member(path, name, time.time())
    click.echo(f"Revoked {count} invite{'s' if count > 1 else ''} of {name} in {path}.", err=True)
    peers = console.split_addresses(initial_peers)
    if not peers:
        click.echo("No peer knows it yet: swarm members publish --initial-peers ADDRESS...", err=True)
        return
    _publish(read_authority(path), peers)


@main.command(cls=console.MultiAddressCommand)
@_file_option
@console.initial_peers_option
@console.errors_to_exit_codes
def publish(path: Path, initial_peers: tuple[str, ...]) -> None:
    """Tell the peers of the swarm which invites are revoked: after a `revoke` that could not, or to be sure."""
    from swarm.membership.authority import read_authority

    authority = read_authority(path)
    if authority.number == 0:
        raise MembershipError(f"no invite of {path} was ever revoked, so there is nothing to publish")
    peers = console.split_addresses(initial_peers)
    if not peers:
        raise MembershipError(f"give --initial-peers ADDRESS... of the swarm, or set {console.INITIAL_PEERS_VARIABLE}")
    _publish(authority, peers)


@main.command(name="list")
@_file_option
@console.errors_to_exit_codes
def list_members(path: Path) -> None:
    """Print all invites: name, state, and the day on which each expires."""
    from swarm.membership.authority import read_authority

    now = time.time()
    found = sorted(read_authority(path).invitations, key=lambda one: (one.name, one.expires))
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        until = f"{datetime.fromtimestamp(one.expires, UTC):%Y-%m-%d %H:%M} UTC"
        click.echo(f"{one.name:<{width}}  {one.state(now):<7}  {until}")
    if not found:
        click.echo(f"{path} has no invites: make one with `swarm members invite NAME`", err=True)


def _publish(authority: Authority, initial_peers: tuple[str, ...]) -> None:
    import uvloop

    from swarm.dht.validation import AnnouncementValidator
    from swarm.transport.p2p import P2PConfig, Peer, quiet_hivemind

    quiet_hivemind()
    now = time.time()

    async def hand_out() -> int:
        config = P2PConfig(initial_peers, membership=authority.publisher(now))
        peer = await Peer.create(config, AnnouncementValidator())
        try:
            authority.require_newest(peer.revocations, now)
            return await peer.hand_out_revocations(authority.revocation_list(now))
        finally:
            await peer.shutdown()

    reached = uvloop.run(hand_out())
    if not reached:
        raise MembershipError("no peer took the list of revocations: try again, or with another --initial-peers")
    told = "1 peer, which tells" if reached == 1 else f"{reached} peers, which tell"
    click.echo(f"Told {told} the others.", err=True)
