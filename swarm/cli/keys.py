"""`swarm keys`: manages a gateway's API keys and their limits."""

from __future__ import annotations

from pathlib import Path

import click

from swarm.common import console
from swarm.gateway import api_keys

POSITIVE_INT = click.IntRange(1, 2**53)

_file_option = click.option(
    "--file",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the gateway's keys: the value of `swarm gateway --keys`.",
)


@click.group(name="keys")
def main() -> None:
    """Add, list and remove API keys of a gateway. A running gateway applies every change at once."""


@main.command()
@click.argument("name")
@_file_option
@click.option("--requests-per-minute", type=POSITIVE_INT, help="Requests in any 60 seconds.  [default: no limit]")
@click.option(
    "--tokens-per-minute", type=POSITIVE_INT, help="Prompt and answer tokens in any 60 s.  [default: no limit]"
)
@click.option("--concurrent", type=POSITIVE_INT, help="Requests at the same time.  [default: no limit]")
@console.errors_to_exit_codes
def add(
    name: str, path: Path, requests_per_minute: int | None, tokens_per_minute: int | None, concurrent: int | None
) -> None:
    """Create a key for NAME and print its secret. It is shown only once: the file holds only its hash."""
    secret = api_keys.add_key(path, name, api_keys.KeyLimits(requests_per_minute, tokens_per_minute, concurrent))
    click.echo(secret)
    click.echo(f"Added key {name} to {path}. Keep the secret: it cannot be shown again.", err=True)


@main.command(name="list")
@_file_option
@console.errors_to_exit_codes
def list_keys(path: Path) -> None:
    """Print each key's name and limits."""
    found = sorted(api_keys.KeyFile.read(path).keys.values(), key=lambda key: key.name)
    width = max((len(key.name) for key in found), default=0)
    for key in found:
        click.echo(f"{key.name:<{width}}  {_limits(key.limits)}")
    if not found:
        click.echo(f"{path} has no keys: create one with `swarm keys add NAME --file {path}`", err=True)


@main.command()
@click.argument("name")
@_file_option
@console.errors_to_exit_codes
def remove(name: str, path: Path) -> None:
    """Remove the key of NAME. Requests that it has already sent are still answered."""
    api_keys.remove_key(path, name)
    click.echo(f"Removed key {name} from {path}.", err=True)


def _limits(limits: api_keys.KeyLimits) -> str:
    parts = {
        "requests/min": limits.requests_per_minute,
        "tokens/min": limits.tokens_per_minute,
        "at once": limits.concurrent,
    }
    return ", ".join(f"{number} {what}" for what, number in parts.items() if number is not None) or "no limits"
