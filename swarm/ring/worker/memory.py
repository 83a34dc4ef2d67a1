"""What a worker remembers across restarts: its secret, its starter, and its port, in one small file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from swarm.common.files.atomic_file import replace_file
from swarm.errors import InvalidOption
from swarm.protocol.messages.peers import PeerId, Port
from swarm.ring.pairing import SECRET_BYTES, new_secret

FILE = "worker.json"
MAX_FILE_BYTES = 1 << 16


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    secret: str
    starter: PeerId | None = None
    port: Port | None = None


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker remembers.

    Attributes:
        path: of the file.
        secret: the pairing secret of its line.
        starter: peer id of the starter that it is paired with; None for none.
        port: at which it listened last, so that its line stays the same.
    """

    path: Path
    secret: bytes = field(repr=False)
    starter: str | None = None
    port: int | None = None

    @classmethod
    def read(cls, folder: Path) -> WorkerMemory:
        """What is remembered in a folder, or a new memory. Raises `InvalidOption` if the file cannot be used."""
        path = folder / FILE
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES)
            content = msgspec.json.decode(data, type=_Content)
            secret = bytes.fromhex(content.secret)
            if len(secret) != SECRET_BYTES:
                raise ValueError("the secret has another length")
        except FileNotFoundError:
            return cls(path, new_secret())
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidOption(
                f"{path} cannot be used: {error}; remove it, which ends the pairing and makes a new line"
            ) from None
        return cls(path, secret, content.starter, content.port)

    def paired_with(self, starter: str | None) -> WorkerMemory:
        """The same with another starter, or none."""
        return replace(self, starter=starter)

    def listening_at(self, port: int) -> WorkerMemory:
        """The same with another port."""
        return replace(self, port=port)

    def forgotten(self) -> WorkerMemory:
        """The same without a starter, and with a new secret, so that the former line counts no more."""
        return replace(self, starter=None, secret=new_secret())

    def write(self) -> None:
        """Write the file, readable by its owner only. Raises `InvalidOption`."""
        content = _Content(self.secret.hex(), self.starter, self.port)
        try:
            replace_file(self.path, msgspec.json.encode(content))
        except OSError as error:
            raise InvalidOption(f"{self.path} cannot be written: {error.strerror}; free some space there") from None
