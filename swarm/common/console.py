"""What all commands share: options that mean the same everywhere, log lines, progress bars, and exit codes.

Exit code 2: something was asked for that cannot be done (one line says what to do). 1: the program failed.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
from pythonjsonlogger.json import JsonFormatter

from swarm.errors import SwarmError, UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

INITIAL_PEERS_VARIABLE = "SWARM_INITIAL_PEERS"
LOG_FORMAT_VARIABLE = "SWARM_LOG_FORMAT"
LOG_LEVEL_VARIABLE = "SWARM_LOGLEVEL"


def initial_peers_option(function: F) -> F:
    """`--initial-peers A B ...`: may be repeated or hold several addresses separated by spaces or commas."""
    return click.option(
        "--initial-peers",
        multiple=True,
        metavar="ADDRESS...",
        envvar=INITIAL_PEERS_VARIABLE,
        help=f"Addresses of peers of the swarm to join. {INITIAL_PEERS_VARIABLE} stands in for the option.",
    )(function)


def log_format_option(function: F) -> F:
    """`--log-format plain|json`, for every command that runs for long; see `log_lines`."""
    return click.option(
        "--log-format",
        type=click.Choice(["plain", "json"]),
        default="plain",
        envvar=LOG_FORMAT_VARIABLE,
        help=f"Log lines for people, or one JSON object a line. {LOG_FORMAT_VARIABLE} stands in for the option.",
    )(function)


def metrics_option(function: F) -> F:
    """`--metrics [HOST:]PORT`, for peers without a web server of their own; see `swarm.metrics.endpoint`."""
    return click.option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Answer Prometheus at http://HOST:PORT/metrics; without HOST for this machine only. "
        "Port 0 takes any free port.  [default: off]",
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


class MultiAddressCommand(click.Command):
    """A command whose address options take any number of values."""

    OPTIONS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_multiple(args, self.OPTIONS))


def exit_codes(function: F) -> F:
    """Turn `SwarmError` into one line and an exit code; Ctrl-C into 130.

    The line goes to stderr, or into the log where that is JSON, which a program reads.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            _say(error)
            sys.exit(2)
        except SwarmError as error:
            _say(error)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run  # type: ignore[return-value]


def _say(error: SwarmError) -> None:
    logger = logging.getLogger("swarm")
    if any(isinstance(handler.formatter, _JsonLineFormatter) for handler in logger.handlers):
        logger.error("%s", error, extra={"error": type(error).__name__})
    else:
        click.echo(f"Error: {error}", err=True)


SECRETS = re.compile(r"\bsk-swarm-[\w-]+|\bhf_[A-Za-z0-9]{8,}|(?<=Bearer )[^\s\"\\]+")
"""Keys of gateways, tokens of the model hub, and whatever else comes in an Authorization header."""


class _RedactingHandler(logging.StreamHandler[TextIO]):
    """Writes log lines above a progress bar that is on the terminal, not into it, and no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return SECRETS.sub("[secret]", super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        shown = "tqdm" in sys.modules and sys.stderr.isatty()
        if not shown:
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _JsonLineFormatter(JsonFormatter):
    """One object a line."""

    def __init__(self) -> None:
        names = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}
        fields = ["asctime", "levelname", "name", "message"]
        super().__init__(fields, rename_fields=names, json_ensure_ascii=False)

    def format(self, record: logging.LogRecord) -> str:
        # hivemind renames a level for the whole process.
        record.levelname = "WARNING" if record.levelno == logging.WARNING else record.levelname
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """RFC 3339, UTC."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_lines(log_format: str = "plain") -> None:
    """Log to stdout from now on. For entry points only.

    Args:
        log_format: "plain": lines without ornaments, for a person who watches a command. "json": one object a line,
            with `time` (RFC 3339, UTC), `level`, `logger`, `message`, what the code gives as `extra`, and `exception`
            where there is one. Python's warnings come the same way, and what other packages leave to the root logger.
    """
    handler = _RedactingHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    if log_format == "json":
        handler.setFormatter(_JsonLineFormatter())
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    logger = logging.getLogger("swarm")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(os.environ.get(LOG_LEVEL_VARIABLE, "INFO"))


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
