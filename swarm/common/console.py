"""What all commands share: common options, logging, progress bars, and exit codes.

Exit code 2: the request cannot be carried out as given (one line says what to do). Exit code 1: the program failed.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from swarm.common.units import ByteSize, format_bytes
from swarm.errors import InvalidOption, SwarmError, UsageError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

INITIAL_PEERS_VARIABLE = "SWARM_INITIAL_PEERS"
MEMBERSHIP_VARIABLE = "SWARM_MEMBERSHIP"
LOG_FORMAT_VARIABLE = "SWARM_LOG_FORMAT"
LOG_LEVEL_VARIABLE = "SWARM_LOGLEVEL"

PROGRESS_INTERVAL_S = 10.0
"""Seconds between progress lines in the log, if the output is not a terminal and cannot show a bar."""


def initial_peers_option(function: F) -> F:
    """Add `--initial-peers A B ...`: repeatable, and takes several addresses separated by spaces or commas."""
    return click.option(
        "--initial-peers",
        multiple=True,
        metavar="ADDRESS...",
        envvar=INITIAL_PEERS_VARIABLE,
        help=f"Addresses of peers of the swarm to join. Default: the value of {INITIAL_PEERS_VARIABLE}.",
    )(function)


def membership_option(function: F) -> F:
    """Add `--membership INVITE|FILE`, for every command that joins a swarm; see `swarm.membership.invite`."""
    return click.option(
        "--membership",
        metavar="INVITE|FILE",
        envvar=MEMBERSHIP_VARIABLE,
        help="For a private swarm: the line that `swarm members invite` printed, or a file that holds it. "
        f"Default: the value of {MEMBERSHIP_VARIABLE}.",
    )(function)


def log_format_option(function: F) -> F:
    """Add `--log-format plain|json`, for every long-running command; see `configure_logging`."""
    return click.option(
        "--log-format",
        type=click.Choice(["plain", "json"]),
        default="plain",
        envvar=LOG_FORMAT_VARIABLE,
        help=f"Plain log lines, or one JSON object per line. Default: the value of {LOG_FORMAT_VARIABLE}, else plain.",
    )(function)


def digests_option(function: F) -> F:
    """Add `--digests FILE`, for every command that uses servers' blocks or weights from peers."""
    return click.option(
        "--digests",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File of `swarm digest`: the weights that servers must have.  [default: those of the model's own source]",
    )(function)


def audit_options(function: F) -> F:
    """Add `--audit SHARE` and `--opinions FILE`, for every command that has servers compute."""
    audit = click.option(
        "--audit",
        default="1%",
        show_default=True,
        metavar="SHARE",
        help="Share of the servers' work that others compute again to find out whether it was right; 0 for none "
        "(docs/trust.md).",
    )
    return audit(
        opinions_option("Keep what audits say of servers in this file; several clients may share it.")(function)
    )


SHOWN_OPINIONS = "Show what the audits of a client have said: the file that it was given as --opinions."


def opinions_option(text: str) -> Callable[[F], F]:
    """Add `--opinions FILE`: what audits have said of servers."""
    return click.option("--opinions", type=click.Path(dir_okay=False, path_type=Path), help=text)


def draft_option(function: F) -> F:
    """Add `--draft DRAFT`, for every command that writes texts."""
    return click.option(
        "--draft",
        "drafts",
        multiple=True,
        metavar="DRAFT",
        default=("copies",),
        help="What guesses the next tokens, so that many are under way at once: 'copies' for what stood in the text "
        "before, or the folder or hub id of a draft head, or of a small model with the same tokens, which runs here. "
        "May be repeated; 'none' for nothing. Answers stay the same.  [default: copies]",
    )(function)


def weights_from_option(function: F) -> F:
    """Add `--weights-from`, for every command that has a client's part of a model."""
    return click.option(
        "--weights-from",
        type=click.Choice(["auto", "hub", "peers"]),
        default="auto",
        help="Where config, tokenizer, embeddings and head come from: this machine or the hub, or servers that share "
        "them. auto: from servers if the hub cannot be reached and it is known which weights to believe.  "
        "[default: auto]",
    )(function)


def metrics_option(function: F) -> F:
    """Add `--metrics [HOST:]PORT`, for peers without a web server of their own; see `swarm.metrics.endpoint`."""
    return click.option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve Prometheus metrics at http://HOST:PORT/metrics; without HOST, on this machine only. "
        "Port 0 takes any free port.  [default: off]",
    )(function)


MAX_RELAYED_PEERS = 1 << 12
"""Peers that one peer may relay for."""


def _relay_option(context: click.Context, parameter: click.Parameter, value: str) -> bool | int:
    """--relay on, off, or for how many peers."""
    if value in ("on", "off"):
        return value == "on"
    if not re.fullmatch(r"[0-9]{1,4}", value) or int(value) > MAX_RELAYED_PEERS:
        raise click.BadParameter(f"{value!r} is neither on nor off nor a number up to {MAX_RELAYED_PEERS}")
    return int(value)


def addresses_of_all_interfaces(port: int) -> tuple[str, ...]:
    """Multiaddresses on which to listen to be reached from everywhere, also by IPv6 where this machine has it."""
    found = [f"/ip4/0.0.0.0/tcp/{port}"]
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        found.append(f"/ip6/::/tcp/{port}")
    return tuple(found)


def host_maddrs_option(default_port: int, explanation: str) -> Callable[[F], F]:
    """The option --host-maddrs."""

    def listen(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
        return value or addresses_of_all_interfaces(default_port)

    port = f"port {default_port}" if default_port else "any free port"
    return click.option(
        "--host-maddrs",
        multiple=True,
        callback=listen,
        metavar="ADDRESS...",
        help=f"{explanation} Port 0 takes any free port.  [default: {port} of all interfaces]",
    )


def network_options(default_port: int) -> Callable[[F], F]:
    """Add the options of every peer that other peers can reach: addresses and identity."""

    def decorate(function: F) -> F:
        options = (
            host_maddrs_option(default_port, "Addresses to listen on."),
            click.option(
                "--announce-maddrs",
                multiple=True,
                metavar="ADDRESS...",
                help="Addresses that other peers should use, if they differ from --host-maddrs (port forwarding).",
            ),
            click.option(
                "--relay",
                default="on",
                callback=_relay_option,
                metavar="on|off|N",
                help="Whether to relay for peers behind routers, and for how many, if others can reach this one; in a "
                "private swarm for members only.  [default: on, for 64 peers]",
            ),
            click.option(
                "--identity-path",
                type=click.Path(dir_okay=False, path_type=Path),
                help="File with this peer's key, created if missing. Without it, every start has a new peer id.",
            ),
        )
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def parse_size(option: str, text: str | None) -> int | None:
    """The value of an option that is a size such as `8GB`. Raises `InvalidOption`."""
    try:
        return ByteSize.parse(text) if text is not None else None
    except ValueError as error:
        raise InvalidOption(f"{option}: {error}") from None


def split_addresses(values: tuple[str, ...]) -> tuple[str, ...]:
    """Split option values that may hold several addresses each."""
    return tuple(part for value in values for part in value.replace(",", " ").split())


def repeat_option_names(
    arguments: list[str], options: frozenset[str], beginnings: tuple[str, ...] = ("/",)
) -> list[str]:
    """Turn `--option A B C` into `--option A --option B --option C`, for options that take several values.

    Args:
        beginnings: of further values; other arguments do not belong to the option.
    """
    result: list[str] = []
    current: str | None = None
    values = 0
    for argument in arguments:
        if argument.startswith("-"):
            name, _, value = argument.partition("=")
            current, values = (name, 0) if name in options and not value else (None, 0)
            result.append(argument)
        elif current is not None and (values == 0 or argument.startswith(beginnings)):
            result.extend([argument] if values == 0 else [current, argument])
            values += 1
        else:
            current = None
            result.append(argument)
    return result


class MultiAddressCommand(click.Command):
    """A command whose address options take any number of values."""

    OPTIONS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})
    VALUES: tuple[str, ...] = ("/",)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_option_names(args, self.OPTIONS, self.VALUES))


def errors_to_exit_codes(function: F) -> F:
    """Turn a `SwarmError` into one line and an exit code, and Ctrl-C into exit code 130.

    The line goes to stderr, or into the log if the log is JSON.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            _print_error(error)
            sys.exit(2)
        except SwarmError as error:
            _print_error(error)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run  # type: ignore[return-value]


@contextmanager
def importing_packages() -> Iterator[None]:
    """Import torch, transformers and what needs them in here: a sixth faster.

    They make a million objects that stay, among which nothing is collected meanwhile, and which no later collection
    goes through.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _print_error(error: SwarmError) -> None:
    ours = logging.getLogger("swarm")
    if any(isinstance(handler.formatter, _JsonLineFormatter) for handler in ours.handlers):
        ours.error("%s", error, extra={"error": type(error).__name__})
    else:
        click.echo(f"Error: {error}", err=True)


SECRET_PATTERN = re.compile(
    r"\bsk-swarm-[\w-]+|\bswarm-invite-[\w-]+|\bswarm-worker:[\w-]+|\bhf_[A-Za-z0-9]{8,}|(?<=Bearer )[^\s\"\\]+"
)
"""Matches gateway keys, invites, workers' lines, model hub tokens, and anything else after `Bearer` in an Authorization
header."""


class _RedactingHandler(logging.StreamHandler[TextIO]):
    """Writes log lines without secrets, and above a progress bar if one is on the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return SECRET_PATTERN.sub("[secret]", super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        may_have_bar = "tqdm" in sys.modules and sys.stderr.isatty()
        if not may_have_bar:
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


_RECORD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"asctime", "message", "taskName"}
"""What every log record has; all else was passed as `extra`."""


class _JsonLineFormatter(logging.Formatter):
    """Formats each log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, object] = {
            # RFC 3339, UTC
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            # hivemind renames the level WARNING for the whole process.
            "level": "WARNING" if record.levelno == logging.WARNING else record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            own["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            own["stack"] = self.formatStack(record.stack_info)
        extra = {name: value for name, value in record.__dict__.items() if name not in _RECORD_ATTRIBUTES}
        return json.dumps(own | extra | own, ensure_ascii=False, default=str, skipkeys=True)


def print_line(text: str) -> None:
    """Print a line. A closed output, or one that lacks a character, is no error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):  # a broken pipe, or a closed stream
        print(text.encode(encoding, "replace").decode(encoding))


def tolerate_missing_characters() -> None:
    """From now on, characters that the standard streams cannot encode are replaced. For entry points only."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream of another kind
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def configure_logging(log_format: str = "plain") -> None:
    """Log to stdout from now on. For entry points only.

    Args:
        log_format: "plain" writes only the message. "json" writes one object per line with `time` (RFC 3339, UTC),
            `level`, `logger`, `message`, `exception` and `stack` if there are any, and the fields that the code passes
            as `extra` under other names. It also covers Python's warnings and what other packages send to the root
            logger.
    """
    tolerate_missing_characters()
    handler = _RedactingHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    if log_format == "json":
        handler.setFormatter(_JsonLineFormatter())
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    ours = logging.getLogger("swarm")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(os.environ.get(LOG_LEVEL_VARIABLE, "INFO"))


def progress_bar(title: str | None, total: int, unit: str) -> Any:
    """A context manager with `update(count)` that shows the progress of some work; nothing without a title.

    A bar on stderr if that is a terminal, else a line in the log every `PROGRESS_INTERVAL_S`.

    Args:
        total: of all counts.
        unit: in the singular, such as "block"; "B" counts bytes.
    """
    if title is not None and not sys.stderr.isatty():
        return LoggedProgress(title, total, unit)
    from tqdm import tqdm

    options = {"file": sys.stderr, "disable": title is None, "leave": False, "unit_scale": unit == "B"}
    return tqdm(total=total, desc=title, unit=unit, **options)


class LoggedProgress:
    """Logs the progress of some work. Work that is done before the first line is due logs nothing.

    Used by one thread.

    Args:
        title, total, unit: as for `progress_bar`.
    """

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = 0
        self._began = self._said = time.monotonic()

    def update(self, count: int = 1) -> None:
        """Add to what is done."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= PROGRESS_INTERVAL_S and self._done < self._total:
            self._said = now
            text = progress_text(self._done, self._total, self._unit, now - self._began)
            logger.info("%s: %s", self._title, text)

    def __enter__(self) -> LoggedProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def progress_text(done: int, total: int, unit: str, seconds: float) -> str:
    """The progress of some work after this many seconds, and how long the rest will take at that rate. Pure."""
    said = f"{format_bytes(done)} of {format_bytes(total)}" if unit == "B" else f"{done} of {total} {unit}s"
    if not done:
        return said
    left = seconds * (total - done) / done
    return f"{said}, about {left:.0f} s left" if left < 100 else f"{said}, about {left / 60:.0f} min left"


def iterate_with_progress(items: Sequence[T], title: str | None, unit: str) -> Iterator[T]:
    """Yield the items, and show with `progress_bar` how many are finished."""
    with progress_bar(title, len(items), unit) as bar:
        for item in items:
            yield item
            bar.update()
