"""`swarm points`: what a server has earned, and what others have earned with it."""

from __future__ import annotations

from pathlib import Path

import click

from swarm.common import console


@click.command(name="points")
@click.argument("identity", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--new", is_flag=True, help="Make the key, if it is not there.")
@console.errors_to_exit_codes
def main(identity: Path, new: bool) -> None:
    """Show the points of the server whose key is in the file IDENTITY (its --identity-path).

    A token-block is one token that passed one block. What others signed for is what they have had of this server, and
    they serve the owner of IDENTITY first for it. Points are what they can spend here in the same way.
    """
    from swarm.errors import IdentityError
    from swarm.transport.identity import load_or_create
    from swarm.trust.points import points_path, read_owners

    if not new and not identity.exists():
        raise IdentityError(
            f"there is no key {identity}; give the --identity-path of your server, or --new to make one"
        )
    peer_id, owners = load_or_create(identity).peer_id, read_owners(points_path(identity))
    console.print_line(f"Owner: {peer_id}")
    if not owners:
        console.print_line("No points yet: nobody has signed for anything that this key's server computed.")
        return
    line = "{:<55}{:>14}{:>14}{:>14}".format
    console.print_line(line("token-blocks", "served", "signed for", "points"))
    for peer, known in sorted(owners.items(), key=lambda one: -one[1].size):
        console.print_line(line(peer, known.served, known.acknowledged, known.worth))
    total = [sum(getattr(one, name) for one in owners.values()) for name in ("served", "acknowledged", "worth")]
    console.print_line(line("in all", *total))
