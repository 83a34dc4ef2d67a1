"""The gateway's keys: who may ask, and how much. A YAML file that `swarm keys` writes and people may edit.

A secret is 256 random bits, shown once; the file holds its SHA-256. No slow hash is needed: nobody
guesses 256 bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from swarm.common import yaml_file
from swarm.errors import KeyFileError

logger = logging.getLogger(__name__)

PREFIX = "sk-swarm-"
SECRET_BYTES = 32
LONGEST_SECRET = 256
"""Characters of what a client may send as its key; anything longer is none."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KIND = "file of keys"
HEADING = "# Keys of a gateway: written by `swarm keys`, which keeps no comments. Limits may be edited while it runs.\n"

Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


@dataclass(frozen=True)
class Limits:
    """What a key may use; None is no limit.

    Attributes:
        requests_per_minute: in any 60 seconds.
        tokens_per_minute: of prompts and answers, in any 60 seconds.
        concurrent: requests that run or wait at the same time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True)
class Key:
    """Who asks: a name from the file, which limits and counters go by. The secret is not known."""

    name: str
    limits: Limits


class _Entry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, _Entry]


@dataclass(frozen=True)
class KeyFile:
    """The keys of a file as it was when it was read.

    Attributes:
        keys: SHA-256 of the secret, in hex -> whose it is.
        stamp: time in ns of the last change and size in bytes; None if the file could not be found any more.
    """

    path: Path
    keys: Mapping[str, Key]
    stamp: tuple[int, int] | None

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Raises `KeyFileError` if the file cannot be used, or if others than its owner could add keys to it."""
        stamp = _stamp(path)  # before reading, so that what changes meanwhile is read again
        return cls(path, {entry.sha256: _key(name, entry) for name, entry in _entries(path).items()}, stamp)

    def find(self, secret: str) -> Key | None:
        """Whose secret it is. Takes equally long for all that are wrong."""
        if len(secret) > LONGEST_SECRET:
            return None
        digest = _digest(secret)
        found = None
        for known, key in self.keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    @property
    def is_old(self) -> bool:
        """Whether the file has changed."""
        return _stamp(self.path) != self.stamp

    def refreshed(self) -> KeyFile:
        """The keys as they are now. Of a file that became unusable the former keys stay valid; it is logged once."""
        stamp = _stamp(self.path)
        if stamp == self.stamp:
            return self
        try:
            return KeyFile.read(self.path)
        except KeyFileError as error:
            logger.error("%s. The keys of before stay valid.", error)
            return replace(self, stamp=stamp)


def add(path: Path, name: str, limits: Limits) -> str:
    """Add a key to the file, which is made if missing, and return the secret.

    Raises `KeyFileError` if the name is taken or no name, or if the file cannot be used.
    """
    if not NAME.fullmatch(name):
        raise KeyFileError(f"{name!r} is no name for a key: use up to 64 of the characters A-Z a-z 0-9 . _ -")
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with _changing(path) as entries:
        if name in entries:
            raise KeyFileError(f"{path} has a key {name} already: remove it first, or choose another name")
        entries[name] = _Entry(_digest(secret), limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)
    return secret


def remove(path: Path, name: str) -> None:
    """Take a key out of the file. Raises `KeyFileError` if it is not there, or if the file cannot be used."""
    if not path.exists():
        raise KeyFileError(f"{path} does not exist, so there is no key {name} to remove")
    with _changing(path) as entries:
        if entries.pop(name, None) is None:
            raise KeyFileError(f"{path} has no key {name}: `swarm keys list` shows those that it has")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "backslashreplace")).hexdigest()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _key(name: str, entry: _Entry) -> Key:
    return Key(name, Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent))


def _entries(path: Path) -> dict[str, _Entry]:
    entries = yaml_file.read(path, _parse, KIND, KeyFileError)
    if path.stat().st_mode & 0o022:
        raise KeyFileError(f"{path} can be changed by others than its owner: chmod 600 {path}")
    return entries


def _parse(data: bytes) -> dict[str, _Entry]:
    entries = yaml_file.convert(data, _File, KeyFileError).keys
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        if not NAME.fullmatch(name):
            raise KeyFileError(f"keys: {name!r} is no name for a key: use the characters A-Z a-z 0-9 . _ -")
        if owners.setdefault(entry.sha256, name) != name:
            raise KeyFileError(f"keys: {owners[entry.sha256]} and {name} have the same secret; remove one of them")
    return entries


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, _Entry]]:
    """The file's entries, written back at the end, while no other process changes the file."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise KeyFileError(f"{path.parent} cannot be used for a {KIND}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = _entries(path) if path.exists() else {}
        yield entries
        _write(path, entries)
    finally:
        os.close(folder)


def _write(path: Path, entries: dict[str, _Entry]) -> None:
    """In one step, so that a gateway that reads meanwhile sees the old or the new file whole."""
    text = HEADING + yaml.safe_dump(msgspec.to_builtins(_File(entries)), sort_keys=False)
    if len(text) > yaml_file.MAX_FILE:
        raise KeyFileError(f"{path} would become larger than {yaml_file.MAX_FILE >> 20} MiB: remove keys first")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # only the owner may read it
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None
