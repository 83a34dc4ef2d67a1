"""The `--throughput` option, and earlier measurements in a small JSON file, so that a server need not measure again.

Whatever is wrong with the file (missing, broken, locked, not writable) only means that the server measures again.
"""

from __future__ import annotations

import fcntl
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path

from swarm.common.files.atomic_file import replace_file
from swarm.common.files.checked_json import fields, items, number, parse_json, text, to_json
from swarm.common.files.folders import cache_folder
from swarm.errors import InvalidOption

logger = logging.getLogger(__name__)

MAX_ENTRIES = 200
"""Number of results kept; the oldest are dropped first."""

MAX_FILE_BYTES = 1 << 20
"""A larger file was not written by this program and is not read."""

MAX_AGE_S = 30 * 24 * 3600.0
"""Seconds after which a result counts no more: drivers, cooling and other load on a machine change."""

MAX_CLOCK_ERROR_S = 3600.0
"""Seconds by which clocks may differ. A result from further in the future would never age, so it does not count."""

LOCK_TIMEOUT_S = 2.0
"""Seconds to wait for another server of this machine to finish writing."""

MAX_RATE = 1e9
"""Blocks x tokens per second that an announcement may claim."""

MAX_TEXT_LENGTH = 4096


@dataclass(frozen=True)
class Throughput:
    """What a server computes, in blocks x tokens per second (a span of n blocks does 1/n of it in tokens/s).

    Attributes:
        decode: in steps of one token.
        forward: where many tokens are computed at once (prefill, training).
    """

    decode: float
    forward: float


@dataclass(frozen=True)
class ThroughputOption:
    """Where a server's throughput comes from: measured once and then remembered, unless a field says otherwise.

    Attributes:
        rate: blocks x tokens per second as given; nothing is measured.
        remeasure: measure even if an earlier result is known.
    """

    rate: float | None = None
    remeasure: bool = False

    @classmethod
    def parse(cls, text: str) -> ThroughputOption:
        """Read `auto`, `measure` or a number. Raises `InvalidOption`."""
        if text in ("auto", "measure"):
            return cls(remeasure=text == "measure")
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e9:
            raise InvalidOption(f"--throughput {text!r}: use auto, measure or a number of blocks per second above 0")
        return cls(rate)


@dataclass(frozen=True)
class MeasurementConditions:
    """All that a measurement depends on; two measurements under the same conditions can stand for each other.

    Attributes:
        hardware: processor and threads, or name of the GPU.
        model, revision: which weights; the revision also stands for the config.
        blocks: the span, such as "0:6": blocks of one model may differ, and they share what a step costs beyond them.
        dtype, quantization: as announced.
        versions: of swarm and of the packages that compute.
    """

    hardware: str
    model: str
    revision: str
    blocks: str
    dtype: str
    quantization: str
    versions: str


@dataclass(frozen=True)
class _CachedThroughput:
    conditions: MeasurementConditions
    decode: float
    forward: float
    measured: float
    """Unix time."""


def default_path() -> Path | None:
    """`$XDG_CACHE_HOME/swarm/throughput.json`, by default under `~/.cache`; None where there is no home."""
    folder = cache_folder()
    return folder / "throughput.json" if folder is not None else None


def lookup(path: Path, conditions: MeasurementConditions, now: float) -> Throughput | None:
    """The newest result under the same conditions, if there is one that is not too old at the Unix time `now`."""
    for entry in reversed(_valid(_read(path), now)):
        if entry.conditions == conditions:
            return Throughput(entry.decode, entry.forward)
    return None


def remember(path: Path, conditions: MeasurementConditions, throughput: Throughput, now: float) -> None:
    """Add a result measured at the Unix time `now`, in the place of an older one under the same conditions."""
    rates = (throughput.decode, throughput.forward)
    if not all(math.isfinite(rate) and 0 < rate <= MAX_RATE for rate in rates):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            others = [entry for entry in _valid(_read(path), now) if entry.conditions != conditions]
            entries = [*others, _CachedThroughput(conditions, *rates, now)]
            replace_file(path, to_json({"entries": [asdict(entry) for entry in entries[-MAX_ENTRIES:]]}, indent=2))
    except (OSError, UnicodeError) as error:
        logger.debug("the measured throughput was not kept: %s", error)


def _valid(entries: list[_CachedThroughput], now: float) -> list[_CachedThroughput]:
    """Those that count at `now`, oldest first."""
    counting = [entry for entry in entries if -MAX_CLOCK_ERROR_S <= now - entry.measured <= MAX_AGE_S]
    return sorted(counting, key=lambda entry: entry.measured)


def _read(path: Path) -> list[_CachedThroughput]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        return _entries(parse_json(data)) if len(data) <= MAX_FILE_BYTES else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:  # bad Unicode is a ValueError
        logger.debug("%s is not used: %s", path, error)
        return []


def _entries(value: object) -> list[_CachedThroughput]:
    (entries,) = fields(value, ("entries",), closed=False)
    return [_entry(one) for one in items(entries)]


def _entry(value: object) -> _CachedThroughput:
    conditions, decode, forward, measured = fields(value, ("conditions", "decode", "forward", "measured"), closed=False)
    names = tuple(field.name for field in dataclass_fields(MeasurementConditions))
    texts = (text(one, MAX_TEXT_LENGTH) for one in fields(conditions, names, closed=False))
    return _CachedThroughput(MeasurementConditions(*texts), _rate(decode), _rate(forward), number(measured, 0))


def _rate(value: object) -> float:
    rate = number(value, 0, MAX_RATE)
    if not rate:
        raise ValueError("a rate is zero")
    return rate


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other servers of this machine from writing.

    A lock that stays taken is passed over: at worst a result is lost.
    """
    with open(path, "ab") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
