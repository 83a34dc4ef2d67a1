"""API keys of a gateway and their limits: a YAML file that `swarm keys` writes and people may edit.

A secret is 256 random bits, shown once; the file holds its SHA-256. A slow hash is not needed, because 256 random bits
cannot be guessed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from swarm.common.files import yaml_file
from swarm.common.files.atomic_file import replace_file
from swarm.errors import KeyFileError

logger = logging.getLogger(__name__)

PREFIX = "sk-swarm-"
SECRET_BYTES = 32
MAX_SECRET_CHARACTERS = 256
"""Of what a client sends as its key. Longer texts are not hashed: they cannot be keys."""

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
INVALID_NAME = "is not a valid key name: use up to 64 of the characters A-Z a-z 0-9 . _ -"

FILE_DESCRIPTION = "key file"
HEADING = (
    "# API keys of a gateway, written by `swarm keys`, which does not keep comments. "
    "Limits may be edited while the gateway runs.\n"
)

Limit = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


@dataclass(frozen=True)
class KeyLimits:
    """How much a key may use; None is unlimited.

    Attributes:
        requests_per_minute: in any 60 seconds.
        tokens_per_minute: of prompts and answers, in any 60 seconds.
        concurrent: requests that run or wait at the same time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """A key by its name, under which its use is counted. The secret is not known."""

    name: str
    limits: KeyLimits


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None


class _KeyFileContent(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, _KeyEntry]


@dataclass(frozen=True)
class KeyFile:
    """The content of a key file when it was read.

    Attributes:
        keys: by the SHA-256 of the secret, in hex.
        stamp: time of the last change in ns and size in bytes; None if the file no longer exists.
    """

    path: Path
    keys: Mapping[str, ApiKey]
    stamp: tuple[int, int] | None

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the file.

        Raises:
            KeyFileError: the file cannot be used, or users other than its owner can change it.
        """
        stamp = _stamp(path)  # before reading, so that a change meanwhile is noticed
        return cls(path, {entry.sha256: _api_key(name, entry) for name, entry in _read_entries(path).items()}, stamp)

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret; None if it is unknown.

        A lookup by hash is safe: its duration depends on the SHA-256 of what was sent, which says nothing about a
        secret of 256 random bits.
        """
        return self.keys.get(_sha256(secret)) if len(secret) <= MAX_SECRET_CHARACTERS else None

    @property
    def is_outdated(self) -> bool:
        """Whether the file has changed since it was read."""
        return _stamp(self.path) != self.stamp

    def refreshed(self) -> KeyFile:
        """The keys as they are in the file now. If it has become unusable, the keys stay, and one error is logged."""
        stamp = _stamp(self.path)
        if stamp == self.stamp:
            return self
        try:
            return KeyFile.read(self.path)
        except KeyFileError as error:
            logger.error("%s. The keys that were read before stay valid.", error)
            return replace(self, stamp=stamp)


def add_key(path: Path, name: str, limits: KeyLimits) -> str:
    """Add a key to the file, which is created if it does not exist, and return the secret.

    Raises:
        KeyFileError: the name is taken or not valid, or the file cannot be used.
    """
    if not KEY_NAME.fullmatch(name):
        raise KeyFileError(f"{name!r} {INVALID_NAME}")
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with _locked_entries(path) as entries:
        if name in entries:
            raise KeyFileError(f"{path} already has a key {name}: remove it first, or choose another name")
        entries[name] = _KeyEntry(
            _sha256(secret), limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent
        )
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file.

    Raises:
        KeyFileError: there is no such key, or the file cannot be used.
    """
    if not path.exists():
        raise KeyFileError(f"{path} does not exist, so there is no key {name} to remove")
    with _locked_entries(path) as entries:
        if entries.pop(name, None) is None:
            raise KeyFileError(f"{path} has no key {name}: `swarm keys list` shows the keys that it has")


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "backslashreplace")).hexdigest()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _api_key(name: str, entry: _KeyEntry) -> ApiKey:
    return ApiKey(name, KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent))


def _read_entries(path: Path) -> dict[str, _KeyEntry]:
    entries = yaml_file.read_file(path, _parse, FILE_DESCRIPTION, KeyFileError)
    if path.stat().st_mode & 0o022:
        raise KeyFileError(f"users other than its owner can change {path}: chmod 600 {path}")
    return entries


def _parse(data: bytes) -> dict[str, _KeyEntry]:
    entries = yaml_file.parse_yaml(data, _KeyFileContent, KeyFileError).keys
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        if not KEY_NAME.fullmatch(name):
            raise KeyFileError(f"keys: {name!r} {INVALID_NAME}")
        if owners.setdefault(entry.sha256, name) != name:
            raise KeyFileError(f"keys: {owners[entry.sha256]} and {name} have the same secret; remove one of them")
    return entries


@contextmanager
def _locked_entries(path: Path) -> Iterator[dict[str, _KeyEntry]]:
    """The file's entries, which are written back at the end. Other processes cannot change the file meanwhile."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise KeyFileError(f"{path.parent} cannot be used for a {FILE_DESCRIPTION}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = _read_entries(path) if path.exists() else {}
        yield entries
        _write(path, entries)
    finally:
        os.close(folder)


def _write(path: Path, entries: dict[str, _KeyEntry]) -> None:
    text = HEADING + yaml.safe_dump(msgspec.to_builtins(_KeyFileContent(entries)), sort_keys=False)
    if len(text) > yaml_file.MAX_FILE_BYTES:
        raise KeyFileError(f"{path} would become larger than {yaml_file.MAX_FILE_BYTES >> 20} MiB: remove keys first")
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None
