"""What a client believes of servers, in a file: liars are still known tomorrow, and `swarm status` can show it."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Annotated

import msgspec

from swarm.common.files.atomic_file import read_small, replace_file
from swarm.common.large_payloads import in_thread
from swarm.errors import OpinionFileError
from swarm.routing.suspicion import MAX_PEERS, STRANGERS, Beliefs, Opinion, Suspicions

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 20
MAX_PEER_ID = 128
MAX_LOG_ODDS = 1000.0

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_PeerId = Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Opinion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    log_odds: Annotated[float, msgspec.Meta(ge=-MAX_LOG_ODDS, le=MAX_LOG_ODDS)]
    when: _Time
    agreed: _Count
    differed: _Count


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: Annotated[dict[_PeerId, _Opinion], msgspec.Meta(max_length=MAX_PEERS)]
    strangers: Annotated[float, msgspec.Meta(ge=STRANGERS / 2, le=1000)]
    bad_strangers: Annotated[float, msgspec.Meta(gt=0, le=1000)]
    betrayed_at: _Time

    def __post_init__(self) -> None:
        if self.bad_strangers >= self.strangers:
            raise ValueError("more dishonest servers than servers")


def read_beliefs(path: Path) -> Beliefs | None:
    """Reads a file of opinions; its times are Unix times. None if it does not exist. Raises `OpinionFileError`."""
    try:
        found = msgspec.json.decode(read_small(path, MAX_FILE_BYTES), type=_File)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpinionFileError(f"the opinions in {path} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise OpinionFileError(
            f"{path} is not a file of opinions on servers ({error}); move it away to begin without any"
        ) from None
    servers = {peer: Opinion(one.log_odds, one.when, one.agreed, one.differed) for peer, one in found.servers.items()}
    return Beliefs(servers, found.strangers, found.bad_strangers, found.betrayed_at)


def read_opinions(path: Path) -> dict[str, Opinion]:
    """The opinions kept now, by peer id. Raises `OpinionFileError` if the file is missing or cannot be read."""
    if (found := read_beliefs(path)) is None:
        raise OpinionFileError(f"there is no {path}: a client writes it after its first audit, with --opinions {path}")
    now = time.time()
    return {peer: one.at(now) for peer, one in found.servers.items()}


class OpinionFile:
    """Keeps the opinions of one client in a file. Several clients may share it: each adds what it has found out.

    Raises `OpinionFileError` if the file that is there cannot be read, or its folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.parent.is_dir():
            raise OpinionFileError(f"cannot keep opinions in {path}: there is no such folder; create it first")
        self._found = read_beliefs(path)

    def load(self, suspicions: Suspicions) -> None:
        """Add what the file said when it was last read."""
        if self._found is not None:
            suspicions.believe(self._found.at_clock(-_unix_shift()))

    async def save(self, suspicions: Suspicions) -> None:
        """Write what is believed now, after reading what others have added. A failure is logged only."""
        try:
            self._found = await in_thread(read_beliefs, self._path)
            self.load(suspicions)
            content = _encoded(suspicions.beliefs.at_clock(_unix_shift()))
            await in_thread(replace_file, self._path, content)
        except (OSError, OpinionFileError) as error:
            logger.warning("the opinions on servers cannot be saved in %s: %s", self._path, error)


def _encoded(beliefs: Beliefs) -> bytes:
    servers = {
        peer: _Opinion(min(one.log_odds, MAX_LOG_ODDS), max(0.0, one.when), one.agreed, one.differed)
        for peer, one in beliefs.servers.items()
    }
    betrayed_at = beliefs.betrayed_at if math.isfinite(beliefs.betrayed_at) else 0.0
    return msgspec.json.encode(_File(servers, beliefs.strangers, beliefs.bad_strangers, max(0.0, betrayed_at)))


def _unix_shift() -> float:
    """How far Unix time is ahead of the clock of opinions."""
    return time.time() - time.monotonic()
