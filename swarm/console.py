"""What all commands share: options that mean the same everywhere, log lines, progress bars, and exit codes.

Exit code 2: something was asked for that cannot be done (one line says what to do). 1: the program failed.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from swarm.errors import SwarmError, UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

INITIAL_PEERS_VARIABLE = "SWARM_INITIAL_PEERS"


def initial_peers_option(function: F) -> F:
    """`--initial-peers A B ...`: may be repeated or hold several addresses separated by spaces or commas."""
    return click.option(
        "--initial-peers",
        multiple=True,
        metavar="ADDRESS...",
        envvar=INITIAL_PEERS_VARIABLE,
        help=f"Addresses of peers of the swarm to join. {INITIAL_PEERS_VARIABLE} stands in for the option.",
    )(function)


def network_options(default_port: int) -> Callable[[F], F]:
    """Options of every peer that others can reach."""

    def decorate(function: F) -> F:
        options = (
            click.option(
                "--host-maddrs",
                multiple=True,
                default=(f"/ip4/0.0.0.0/tcp/{default_port}",),
                show_default=True,
                metavar="ADDRESS...",
                help="Where to listen. Port 0 takes any free port.",
            ),
            click.option(
                "--announce-maddrs",
                multiple=True,
                metavar="ADDRESS...",
                help="Addresses that others should use, if they differ from those listened on (port forwarding).",
            ),
            click.option(
                "--identity-path",
                type=click.Path(dir_okay=False, path_type=Path),
                help="File of this peer's key, made if missing. Without it the peer id is new at every start.",
            ),
        )
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def split(values: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses in option values that may hold several each."""
    return tuple(part for value in values for part in value.replace(",", " ").split())


def spread_multiple(arguments: list[str], options: frozenset[str]) -> list[str]:
    """Let `--option A B C` mean `--option A --option B --option C`, for the options that take several addresses."""
    result: list[str] = []
    current: str | None = None
    taken = 0
    for argument in arguments:
        if argument.startswith("-"):
            name, _, value = argument.partition("=")
            current, taken = (name, 0) if name in options and not value else (None, 0)
            result.append(argument)
        elif current is not None and (taken == 0 or argument.startswith("/")):
            result.extend([argument] if taken == 0 else [current, argument])
            taken += 1
        else:
            current = None
            result.append(argument)
    return result


class ManyAddresses(click.Command):
    """A command whose address options take any number of values."""

    OPTIONS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_multiple(args, self.OPTIONS))


def exit_codes(function: F) -> F:
    """Turn `SwarmError` into one line on stderr and an exit code; Ctrl-C into 130."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(2)
        except SwarmError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run  # type: ignore[return-value]


class _BesideBars(logging.StreamHandler[TextIO]):
    """Writes log lines above a progress bar that is on the terminal, not into it."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = "tqdm" in sys.modules and sys.stderr.isatty()
        if not shown:
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def plain_log_lines() -> None:
    """Log lines without ornaments, on stdout, for a person who watches a command."""
    handler = _BesideBars(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("swarm")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(os.environ.get("SWARM_LOGLEVEL", "INFO"))


def progress_bar(title: str | None, total: int, unit: str) -> Any:
    """A bar on stderr for `with`, moved on by `update(count)`. Nothing without a title, or where no terminal is."""
    from tqdm import tqdm

    return tqdm(total=total, desc=title, unit=unit, file=sys.stderr, disable=_hidden(title), leave=False)


def progress(items: Sequence[T], title: str | None, unit: str) -> Iterator[T]:
    """The items, with a bar as in `progress_bar` that counts those done."""
    with progress_bar(title, len(items), unit) as bar:
        for item in items:
            yield item
            bar.update()


def _hidden(title: str | None) -> bool:
    return title is None or not sys.stderr.isatty()
